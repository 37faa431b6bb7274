"""Errors of protocols that do not speak OpenAI's language: their own shapes and their own names of fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import UsageError
from octavo.server.errors import ApiError
from octavo.server.http.dialects import Dialect
from octavo.server.http.json_body import JsonRoute
from octavo.server.http.openapi import ERRORS

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


ANTHROPIC = Dialect(anthropic_body, id_header=b"request-id")
TGI = Dialect(tgi_body)


def protocol_route(spoken: Dialect, field_names: Mapping[str, str]) -> type[JsonRoute]:
    """A route class whose errors are told in this dialect.

    field_names: what the protocol calls the fields that sampling parameters and prompts have by other names.
    """

    class ProtocolRoute(JsonRoute):
        dialect = spoken

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()

            async def handle(request: Request) -> Response:
                try:
                    return await handler(request)
                except UsageError as error:
                    raise rename_fields(error, field_names) from None

            return handle

    return ProtocolRoute


def describe_errors(schema: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """For OpenAPI: all errors of an endpoint have this schema."""
    content = {"application/json": {"schema": schema}}
    return {int(status): {"description": text, "content": content} for status, text in ERRORS.items()}


def rename_fields(error: UsageError, names: Mapping[str, str]) -> UsageError:
    """The error as it speaks of the protocol's own fields."""
    message = str(error)
    for name, own in names.items():
        # A name without an underscore is a word of English too, except where the message begins with it. Behind a dot
        # it is a part of a name that is the protocol's own already.
        message = re.sub(rf"(?<![\w.]){name}\b" if "_" in name else rf"^{name}\b", own, message)
    param = error.param
    if param is not None:
        head = re.split(r"[.\[]", param, maxsplit=1)[0]
        param = names.get(head, head) + param[len(head) :]
        # What chat completions call `function`, tools of these protocols are themselves.
        param = re.sub(r"^(tools\[\d+\])\.function\.", r"\1.", param)
    return UsageError(message, param=param, code=error.code)


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
