"""The request fields that mark prompt prefixes to keep in the cache, as positions in the prompt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from octavo.server.generation.spec import Breakpoint
from octavo.server.protocols.protocol_fields import NullIsAbsent

MAX_BREAKPOINTS = 4
_RETENTION_S = {"24h": 24 * 3600.0}
_OPTIONS_S = 1800.0  # the only `ttl` that OpenAI allows


class PromptCacheOptions(NullIsAbsent):
    """The parts of a prompt that stay in the cache longer than usual, and how long they stay (`ttl`).

    mode: `implicit` keeps the whole prompt, `explicit` keeps the marked prefixes
    """

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m"] | None = None


class PromptCacheBreakpoint(NullIsAbsent):
    """A mark on a part of the content: the prompt up to the end of this part stays in the cache."""

    mode: Literal["explicit"]


def marked_breakpoints(texts: Iterable[tuple[str, float | None]]) -> list[Breakpoint]:
    """Return the breakpoints at the ends of marked texts. A mark on the last text marks the whole prompt.

    texts: all texts of the messages in order, each with the seconds of its mark, or with None if it has no mark
    """
    found: list[Breakpoint] = []
    before: list[str] = []
    seconds: float | None = None
    for text, seconds in texts:
        before += [text] if text.strip() else []
        if seconds is not None:
            found.append(Breakpoint(seconds, tuple(before)))
    if seconds is not None:
        found[-1] = found[-1]._replace(texts=None)
    return found


def openai_breakpoints(
    options: PromptCacheOptions | None,
    retention: str | None,
    texts: Iterable[tuple[str, PromptCacheBreakpoint | None]] = (),
) -> tuple[Breakpoint, ...]:
    """Return the breakpoints that OpenAI's fields define, at most the last four.

    texts: all texts of the messages in order, each with its mark or None
    """
    seconds = _RETENTION_S.get(retention or "", 0.0)
    if options is not None and options.mode != "explicit":
        seconds = max(seconds, _OPTIONS_S)
    marked = marked_breakpoints((text, None if mark is None else _OPTIONS_S) for text, mark in texts)
    whole = [Breakpoint(seconds)] if seconds else []
    return tuple([*marked, *whole][-MAX_BREAKPOINTS:])
