"""The errors of Anthropic's interface."""

from __future__ import annotations

from typing import Any

from octavo.server.errors import ApiError
from octavo.server.http.route_table import Dialect
from octavo.server.protocols.answer_schemas import json_schema
from octavo.server.protocols.protocol import Protocol, named_message

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


_ERROR = {"type": str, "message": str, "details?": {"error_code": str}}


def _body(error: ApiError, request_id: str) -> dict[str, Any]:
    """Return `{"type": "error", "error": {"type", "message"}, "request_id"}`, with Anthropic's error types."""
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    shown: dict[str, Any] = {"type": kind, "message": named_message(error)}
    if error.code == "thread_unsupported_request":
        shown["details"] = {"error_code": error.code}
    return {"type": "error", "error": shown, "request_id": request_id}


ANTHROPIC = Protocol(
    "Anthropic",
    Dialect(_body, id_header=b"request-id"),
    json_schema({"type": "error", "error": _ERROR, "request_id?": str}),
)
