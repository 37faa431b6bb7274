"""The error formats of Anthropic, TGI and Ollama, and routes whose errors name the protocol's own fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import UsageError
from octavo.server.errors import ApiError
from octavo.server.http.json_body import JsonRoute
from octavo.server.http.route_table import Dialect

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_TOOL_MEMBER = re.compile(r"(tools\[\d+\])\.function\.(\w+)")
_TGI_TYPES = {503: "overloaded", 500: "generation", 504: "generation"}


def _message(error: ApiError) -> str:
    """The message, with the name of the field, for which these shapes have no place of their own."""
    is_named = error.param is None or error.param in error.message
    return error.message if is_named else f"{error.param}: {error.message}"


def anthropic_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """`{"type": "error", "error": {"type", "message"}, "request_id"}`, with Anthropic's types of errors."""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": _message(error)}, "request_id": request_id}


def tgi_body(error: ApiError, _request_id: str) -> dict[str, Any]:
    """`{"error", "error_type"}`. Hugging Face's client makes its exceptions from the type."""
    return {"error": _message(error), "error_type": _TGI_TYPES.get(error.status, "validation")}


ANTHROPIC = Dialect(anthropic_body, id_header=b"request-id")
TGI = Dialect(tgi_body)


def ollama_body(error: ApiError, _request_id: str) -> dict[str, Any]:
    """`{"error": message}`."""
    return {"error": _message(error)}


OLLAMA = Dialect(ollama_body)


def protocol_route(spoken: Dialect, field_names: Mapping[str, str]) -> type[JsonRoute]:
    """A route class whose errors have the form of this dialect.

    field_names: the protocol's names for fields of sampling parameters and prompts.
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


def rename_fields(error: UsageError, names: Mapping[str, str]) -> UsageError:
    """The error in terms of the protocol's own fields."""

    def renamed(text: str) -> str:
        # Tools of these protocols have the members of `function` themselves.
        text = _TOOL_MEMBER.sub(lambda match: f"{match[1]}.{names.get(match[2], match[2])}", text)
        for name, own in names.items():
            # A name without an underscore is an English word too, except at the beginning. Behind a dot it is part of
            # one of the protocol's own names.
            text = re.sub(rf"(?<![\w.]){name}\b" if "_" in name else rf"^{name}\b", own, text)
        return text

    return UsageError(renamed(str(error)), param=error.param and renamed(error.param), code=error.code)
