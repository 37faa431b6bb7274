"""Ollama's error format."""

from __future__ import annotations

from typing import Any

from octavo.server.errors import ApiError
from octavo.server.http.route_table import Dialect
from octavo.server.protocols.answer_schemas import json_schema
from octavo.server.protocols.protocol import Protocol, named_message


def _body(error: ApiError, _request_id: str) -> dict[str, Any]:
    """Return `{"error": message}`."""
    return {"error": named_message(error)}


OLLAMA = Protocol("Ollama", Dialect(_body, root="/api/"), json_schema({"error": str}))
