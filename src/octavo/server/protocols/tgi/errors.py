"""Text Generation Inference's error format."""

from __future__ import annotations

from typing import Any

from octavo.server.errors import ApiError
from octavo.server.http.route_table import Dialect
from octavo.server.protocols.answer_schemas import json_schema
from octavo.server.protocols.protocol import Protocol, named_message

_TYPES = {503: "overloaded", 500: "generation", 504: "generation"}


def _body(error: ApiError, _request_id: str) -> dict[str, Any]:
    """Return `{"error", "error_type"}`. Hugging Face's client chooses its exception by the type."""
    return {"error": named_message(error), "error_type": _TYPES.get(error.status, "validation")}


TGI = Protocol(
    "Text Generation Inference",
    Dialect(_body),
    json_schema({"error": str, "error_type": ("validation", "overloaded", "generation")}),
)
