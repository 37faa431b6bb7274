"""The `cache_control` fields of a request to `/v1/messages`, as positions in its prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from octavo.server.generation.spec import Breakpoint
from octavo.server.protocols.cache_breakpoints import MAX_BREAKPOINTS, marked_breakpoints

if TYPE_CHECKING:
    from octavo.server.protocols.anthropic.request import AnyBlock, CacheControl, CountTokensRequest

SECONDS = {"5m": 300.0, "1h": 3600.0}


def read_breakpoints(body: CountTokensRequest) -> tuple[Breakpoint, ...]:
    """Return the breakpoints of tools, system and messages, in this order. A field of the request itself marks the
    whole prompt.

    If there are more than four, only the last four are used. Leaving one out does not change an answer, whereas an
    error would end an agent's session.
    """
    found = [
        Breakpoint(_seconds(control), (tool.name,), is_tool=True)
        for tool in body.tools or ()
        if (control := getattr(tool, "cache_control", None)) is not None
    ]
    found += marked_breakpoints(
        (text, None if control is None else _seconds(control)) for text, control in _texts(body)
    )
    if body.cache_control is not None:
        found.append(Breakpoint(_seconds(body.cache_control)))
    return tuple(found[-MAX_BREAKPOINTS:])


def _seconds(control: CacheControl) -> float:
    return SECONDS[control.ttl or "5m"]


def _texts(body: CountTokensRequest) -> Iterator[tuple[str, CacheControl | None]]:
    """Yield the texts of the system prompt and the messages in order, each with its `cache_control`."""
    if isinstance(body.system, str):
        yield body.system, None
    for block in body.system if isinstance(body.system, list) else ():
        yield block.text, block.cache_control
    for message in body.messages:
        if isinstance(message.content, str):
            yield message.content, None
            continue
        for each in message.content:
            yield _text_of(each), getattr(each, "cache_control", None)


def _text_of(block: AnyBlock) -> str:
    if block.type == "text":
        return block.text
    if block.type == "tool_use":
        return block.name
    if block.type != "tool_result":
        return ""
    content = block.content
    if isinstance(content, str) or content is None:
        return content or ""
    return next((part.text for part in reversed(content) if part.type == "text"), "")
