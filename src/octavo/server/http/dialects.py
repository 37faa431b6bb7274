"""The error format of a protocol, and its header for request ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from octavo.server.errors import ApiError

REQUEST_ID_HEADER = b"x-request-id"


def openai_body(error: ApiError, _request_id: str) -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`."""
    return error.body()


@dataclass(frozen=True, slots=True)
class Dialect:
    """error_body: makes the body from an error and the request's id. id_header: besides x-request-id, in lower case."""

    error_body: Callable[[ApiError, str], dict[str, Any]] = openai_body
    id_header: bytes | None = None

    def id_headers(self, request_id: str) -> list[tuple[bytes, bytes]]:
        """The headers that tell a client the id."""
        names = [REQUEST_ID_HEADER] if self.id_header is None else [REQUEST_ID_HEADER, self.id_header]
        return [(name, request_id.encode()) for name in names]


OPENAI = Dialect()
