"""The error format and the header for request ids of each protocol, and the choice of the protocol by path."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from starlette.routing import BaseRoute, Route

from octavo.server.errors import ApiError

REQUEST_ID_HEADER = b"x-request-id"


def openai_body(error: ApiError, _request_id: str) -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`."""
    return error.body()


@dataclass(frozen=True, slots=True)
class Dialect:
    """error_body: makes the body of an error with the request's id. id_header: used beside x-request-id, lower case."""

    error_body: Callable[[ApiError, str], dict[str, Any]] = openai_body
    id_header: bytes | None = None

    def id_headers(self, request_id: str) -> list[tuple[bytes, bytes]]:
        """The headers that carry the request's id."""
        names = [REQUEST_ID_HEADER] if self.id_header is None else [REQUEST_ID_HEADER, self.id_header]
        return [(name, request_id.encode()) for name in names]


OPENAI = Dialect()


@dataclass(frozen=True, slots=True)
class Dialects:
    """by_path: the dialects of paths that do not use OpenAI's. They also apply to all known and unknown paths below."""

    by_path: dict[str, Dialect] = field(default_factory=dict)

    @classmethod
    def of_routes(cls, routes: Iterable[BaseRoute]) -> Dialects:
        """The dialects of routes whose classes have a `dialect`."""
        found: dict[str, Dialect] = {}
        for route in routes:
            dialect = getattr(route, "dialect", None)
            if isinstance(route, Route) and isinstance(dialect, Dialect):
                found[route.path] = dialect
        return cls(found)

    def find(self, path: str) -> Dialect:
        """The dialect of a path, which need not exist."""
        if (exact := self.by_path.get(path)) is not None:
            return exact
        for known, dialect in self.by_path.items():
            if known != "/" and path.startswith(f"{known}/"):
                return dialect
        return OPENAI
