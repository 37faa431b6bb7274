"""The fields of a request that say which beginnings of its prompt stay in the cache, as places in the prompt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from octavo.server.generation.spec import Breakpoint
from octavo.server.protocols.protocol_fields import NullIsAbsent

MAX_BREAKPOINTS = 4
_RETENTION_S = {"24h": 24 * 3600.0}
_OPTIONS_S = 1800.0  # of the one `ttl` that OpenAI has


class PromptCacheOptions(NullIsAbsent):
    """implicit: the whole prompt stays in the cache longer than others, for `ttl`; explicit: what is marked does."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m"] | None = None


class PromptCacheBreakpoint(NullIsAbsent):
    """A mark of a part of the content: the prompt up to its end stays in the cache."""

    mode: Literal["explicit"]


def marked_breakpoints(texts: Iterable[tuple[str, float | None]]) -> list[Breakpoint]:
    """Those at the ends of marked texts. texts: all of the messages in their order, each with the seconds of its mark.

    A mark of the last text means the whole prompt.
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
    """Those of OpenAI's fields: the last four.

    texts: see `marked_breakpoints`.
    """
    seconds = _RETENTION_S.get(retention or "", 0.0)
    if options is not None and options.mode != "explicit":
        seconds = max(seconds, _OPTIONS_S)
    marked = marked_breakpoints((text, None if mark is None else _OPTIONS_S) for text, mark in texts)
    whole = [Breakpoint(seconds)] if seconds else []
    return tuple([*marked, *whole][-MAX_BREAKPOINTS:])
