"""Errors of protocols that do not speak OpenAI's language: their own shapes and their own names of fields."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo.errors import OctavoError, UsageError
from octavo.server.errors import ApiError, to_api_error
from octavo.server.http.access_log import record_of
from octavo.server.http.json_body import JsonRoute
from octavo.server.http.validation import to_bad_request

ANTHROPIC_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}
TGI_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error", "error_type"],
    "properties": {
        "error": {"type": "string"},
        "error_type": {"enum": ["validation", "overloaded", "generation"]},
    },
}

logger = logging.getLogger(__name__)


def openai_body(error: ApiError, _request_id: str) -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`."""
    return error.body()


def anthropic_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """`{"type": "error", "error": {"type", "message"}, "request_id"}`, with Anthropic's types of errors."""
    message = error.message
    if error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"  # the shape has no place of its own for it
    described = {"type": _anthropic_type(error), "message": message}
    return {"type": "error", "error": described, "request_id": request_id}


def tgi_body(error: ApiError, _request_id: str) -> dict[str, Any]:
    """`{"error", "error_type"}`, from whose type Hugging Face's client makes its exceptions."""
    kinds = {503: "overloaded", 500: "generation", 504: "generation"}
    message = error.message
    if error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"
    return {"error": message, "error_type": kinds.get(error.status, "validation")}


def error_route(
    to_body: Callable[[ApiError, str], dict[str, Any]], field_names: Mapping[str, str] | None = None
) -> type[JsonRoute]:
    """A route class whose errors have the body that `to_body` makes of them and the request's id.

    field_names: what the protocol calls the fields that sampling parameters and prompts have by other names.
    """
    names = field_names or {}

    class ErrorRoute(JsonRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()

            async def handle(request: Request) -> Response:
                try:
                    return await handler(request)
                except RequestValidationError as error:
                    api_error = to_bad_request(error.errors(), error.body)
                except (ApiError, OctavoError) as error:
                    api_error = _to_api_error(error, request, names)
                record_of(request).error_code = api_error.code
                body = to_body(api_error, request_id_of(request))
                return JSONResponse(body, status_code=api_error.status, headers=api_error.headers)

            return handle

    return ErrorRoute


def describe_errors(own_schema: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """For OpenAPI: an endpoint's errors have this schema; those of the guard before it are the common envelope."""
    either = {"anyOf": [own_schema, {"$ref": "#/components/schemas/Error"}]}
    content = {"application/json": {"schema": either}}
    statuses = {400: "The request is wrong", 404: "There is no such model", 500: "A fault of the server"}
    statuses |= {503: "No room now; try again after Retry-After seconds", 504: "The request ran for too long"}
    return {status: {"description": text, "content": content} for status, text in statuses.items()}


def rename_fields(error: UsageError, names: Mapping[str, str]) -> UsageError:
    """The error as it speaks of the protocol's own fields."""
    message = str(error)
    for name, own in names.items():
        # A name without an underscore is a word of English too, except where the message begins with it.
        message = re.sub(rf"\b{name}\b" if "_" in name else rf"^{name}\b", own, message)
    param = error.param
    if param is not None:
        head = re.split(r"[.\[]", param, maxsplit=1)[0]
        param = names.get(head, head) + param[len(head) :]
    return UsageError(message, param=param, code=error.code)


def request_id_of(request: Request) -> str:
    """The id that the guard gave this request."""
    return str(getattr(request.state, "request_id", ""))


def _to_api_error(error: Exception, request: Request, names: Mapping[str, str]) -> ApiError:
    if isinstance(error, UsageError):
        error = rename_fields(error, names)
    request_id = request_id_of(request)
    api_error = to_api_error(error, request_id)
    if api_error.status == 500:
        logger.error("request %s failed", request_id, exc_info=error)
    return api_error


def _anthropic_type(error: ApiError) -> str:
    by_status = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
    return by_status.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
