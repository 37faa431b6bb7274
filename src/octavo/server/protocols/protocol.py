"""A protocol: its error format, and routes whose errors use the protocol's own field names."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import UsageError
from octavo.server.errors import ApiError
from octavo.server.http.json_route import JsonRoute
from octavo.server.http.route_table import DEFAULT_DIALECT, Dialect
from octavo.server.protocols.answer_schemas import Schema, errors

_TOOL_MEMBER = re.compile(r"(tools\[\d+\])\.function\.(\w+)")


@dataclass(frozen=True, slots=True)
class Protocol:
    """A protocol that the server speaks.

    tag: tag of its routes in the OpenAPI document
    dialect: its error format
    error_schema: schema of an error, or None for OpenAI's schema
    """

    tag: str
    dialect: Dialect = DEFAULT_DIALECT
    error_schema: Schema | None = None

    def router(self, field_names: Mapping[str, str] | None = None) -> APIRouter:
        """Return a router for this protocol's routes. Paths below one of its routes use the same error format.

        field_names: the protocol's names for fields of sampling parameters and prompts, or None if they are the same
        """
        responses = None if self.error_schema is None else errors(self.error_schema)
        return APIRouter(route_class=_route_class(self.dialect, field_names), tags=[self.tag], responses=responses)


def _route_class(spoken: Dialect, field_names: Mapping[str, str] | None) -> type[JsonRoute]:
    class ProtocolRoute(JsonRoute):
        dialect = spoken

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()
            if field_names is None:
                return handler

            async def handle(request: Request) -> Response:
                try:
                    return await handler(request)
                except UsageError as error:
                    raise rename_fields(error, field_names) from None

            return handle

    return ProtocolRoute


def rename_fields(error: UsageError, names: Mapping[str, str]) -> UsageError:
    """Return the error with the protocol's own field names."""

    def renamed(text: str) -> str:
        # In these protocols, tools have the members of `function` themselves.
        text = _TOOL_MEMBER.sub(lambda match: f"{match[1]}.{names.get(match[2], match[2])}", text)
        for name, own in names.items():
            # A name without an underscore is also an English word, except at the beginning. After a dot it is part of
            # one of the protocol's own names.
            text = re.sub(rf"(?<![\w.]){name}\b" if "_" in name else rf"^{name}\b", own, text)
        return text

    return UsageError(renamed(str(error)), param=error.param and renamed(error.param), code=error.code)


def named_message(error: ApiError) -> str:
    """Return the message with the name of the field, for error formats that have no separate place for it."""
    is_named = error.param is None or error.param in error.message
    return error.message if is_named else f"{error.param}: {error.message}"
