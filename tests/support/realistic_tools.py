"""Tools as large as those of coding assistants."""

from __future__ import annotations

from typing import Any

from tests.support.tool_outputs import tool


def realistic_tools(count: int) -> list[dict[str, Any]]:
    """Return tools with parameters like those of coding assistants, about 1.7 KB each."""
    location = {"type": "object", "properties": {"path": {"type": "string"}, "line": {"type": "integer", "minimum": 1}}}
    properties = {
        "query": {"type": "string", "description": "What to look for. " * 20, "minLength": 1},
        "kind": {"type": "string", "enum": [f"kind_{index}" for index in range(12)]},
        "limit": {"type": ["integer", "null"], "minimum": 1, "maximum": 1000, "default": 20},
        "since": {"type": "string", "format": "date-time", "description": "From when on. " * 10},
        "locations": {"type": "array", "items": {"$ref": "#/$defs/Location"}, "maxItems": 50},
        "filter": {"anyOf": [{"type": "string", "pattern": "^[a-z_.*]+$"}, {"type": "null"}]},
        "options": {
            "type": "object",
            "properties": {f"flag_{index}": {"type": "boolean", "description": "A flag."} for index in range(8)},
            "additionalProperties": False,
        },
    }
    tools = [
        tool(f"tool_{index}", {**properties, f"own_{index}": {"type": "number"}}, ("query",)) for index in range(count)
    ]
    for item in tools:
        item["function"]["parameters"]["$defs"] = {"Location": location}
    return tools
