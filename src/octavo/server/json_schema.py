"""What of JSON schema can be enforced, checked before a request costs anything.

Nothing is accepted and then ignored: a keyword that constrains and cannot be enforced is named by JSON pointer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.server.generation.spec import ToolChoice


def check_schema(schema: object, param: str) -> None:
    """Raises UsageError(param=param, code="invalid_json_schema") where a schema is wrong, too large or unsupported."""


def check_tools(tools: Sequence[dict[str, Any]], param: str = "tools") -> None:
    """Raises UsageError where the tools of a request are too many, ill-named, named twice or have a wrong schema."""


def check_tool_choice(tool_choice: ToolChoice, tools: Sequence[dict[str, Any]], param: str = "tool_choice") -> None:
    """Raises UsageError where a tool must be called that the request does not have."""
