"""Errors of the HTTP interface: one envelope with an exact status, type, param and code.

`{"error": {"message": str, "type": str, "param": str | null, "code": str | null}}`, as OpenAI's clients expect it.
"""

from __future__ import annotations

import logging

from octavo.errors import (
    EngineDeadError,
    GenerationTimeoutError,
    InsufficientMemoryError,
    ModelLoadError,
    NumericalError,
    OctavoError,
    OverloadedError,
    UsageError,
)

logger = logging.getLogger(__name__)

# Every operation can return any of these.
STATUSES = {
    400: "The request is invalid",
    401: "The API key is missing or wrong",
    403: "This host or page may not call the server",
    404: "There is no such model or path",
    405: "The path does not support this method",
    408: "The request did not arrive in time",
    413: "The body is too large",
    415: "The body is not plain JSON",
    429: "Too many requests from one caller",
    431: "The headers are too large",
    499: "The request was cancelled through /v1/requests",
    500: "Internal error",
    501: "The body uses a transfer coding other than chunked",
    503: "No capacity now; try again after Retry-After seconds",
    504: "The request ran for too long",
    505: "The HTTP version is neither 1.0 nor 1.1",
}


class ApiError(Exception):
    """An error answer. It may be raised anywhere below an endpoint. In a stream that has begun, it becomes an event."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, dict[str, str | None]]:
        """Return the error's envelope."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class ClientGoneError(Exception):
    """The client has disconnected, so nobody will read the answer."""


def shutting_down() -> ApiError:
    """Return the error for requests that the server does not finish before it exits."""
    message = "the server is shutting down"
    return ApiError(503, message, code="server_shutting_down", headers={"Retry-After": "10"})


def bad_request(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """Return a 400 error: the request is invalid."""
    return ApiError(400, message, param=param, code=code)


def refuse(param: str, reason: str, code: str = "unsupported_value") -> UsageError:
    """Return the error for a value that is well-formed but unsupported."""
    return UsageError(f"{param} {reason}", param=param, code=code)


def to_api_error(error: Exception, request_id: str) -> ApiError:
    """Convert any exception to an error answer. Internal errors are logged, and the answer contains only the request
    id.
    """
    answer = _to_answer(error, request_id)
    if answer.status == 500:
        expected = isinstance(error, (ApiError, OctavoError))  # raised on purpose, so logged without a traceback
        logger.error("request %s failed: %s", request_id, error, exc_info=None if expected else error)
    return answer


def _to_answer(error: Exception, request_id: str) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UsageError):
        return bad_request(str(error), error.param, error.code or "invalid_value")
    if isinstance(error, OverloadedError):
        seconds = str(max(1, round(error.retry_after_s)))
        return ApiError(503, str(error), code=error.code, headers={"Retry-After": seconds})
    if isinstance(error, GenerationTimeoutError):
        return ApiError(504, str(error), code="generation_timeout")
    if isinstance(error, NumericalError):
        return ApiError(
            500, f"the model computed a value that is not a number (request {request_id})", code="numerical_error"
        )
    if isinstance(error, EngineDeadError):
        message = f"the engine stopped while this request was running; send it again (request {request_id})"
        return ApiError(500, message, code="engine_restarting")
    if isinstance(error, (ModelLoadError, InsufficientMemoryError)):
        # Callers see this only if a model is loaded on demand. The details stay in the log.
        message = f"the model cannot be loaded; see the server's log (request {request_id})"
        return ApiError(503, message, code="model_loading", headers={"Retry-After": "10"})
    kind = "internal server error" if isinstance(error, OctavoError) else "unexpected server error"
    return ApiError(500, f"{kind}; see its log (request {request_id})", code="internal_error")
