"""Cuts a long text into pieces that are encoded one by one, to the same tokens as the whole text.

The library needs a hundred bytes of memory per byte of text, and nothing can stop it midway. Therefore a long text is
encoded in pieces. There is no general rule for where a text may be cut, because patterns, normalizers and merges
differ. Each cut is therefore tried on the text around it: its tokens must equal the tokens of its two halves. This is
repeated with several widths of text, because merges can depend on where a run of the same character begins. Without a
valid cut, a piece becomes longer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import TypeAlias

EncodeMany: TypeAlias = Callable[[Sequence[str]], "list[list[int]]"]
"""Returns the token ids of several texts."""

PIECE_CHARS = 1 << 15
_WINDOW_CHARS = 1 << 11  # search range for cuts before the end of a piece
_WIDTHS = (256, 251, 243)  # around a cut; they share no period
_TRIES = 4  # per kind
# The kinds of cuts, best first. Runs of white space are never cut, because patterns look at their ends.
_CUTS = (
    re.compile(r"(?<=[^\W\d_])(?=\s[^\W\d_])"),  # before a single space between two letters
    re.compile(r"(?<=\S)(?=\s)"),
    re.compile(r"(?<=[^\W\d_])(?=\d)|(?<=\d)(?=[^\W\d_])|(?<=\w)(?=[^\w\s])"),
    re.compile(r"(?<=\S)(?=\S)"),
)


def cut_text(text: str, encode: EncodeMany) -> Iterator[str]:
    """Yield the pieces of a text, in order. A space at a cut is left out if the tokenizer puts one before each text."""
    begin, size = 0, PIECE_CHARS
    while begin < len(text):
        if begin + size >= len(text):
            yield text[begin:]
            return
        found = _find_cut(text, begin + size, encode)
        if found is None:
            size *= 2
            continue
        end, next_begin = found
        yield text[begin:end]
        begin, size = next_begin, PIECE_CHARS


def _find_cut(text: str, limit: int, encode: EncodeMany) -> tuple[int, int] | None:
    """Return (end of a piece, beginning of the next) at or before `limit`, or None."""
    start = limit - _WINDOW_CHARS
    for kind in _CUTS:
        places = [match.start() for match in kind.finditer(text, start, limit)]
        # From the end, and then from everywhere, because a run at the end may not allow a cut.
        spread = places[:: max(1, len(places) // _TRIES)]
        for place in chain(islice(reversed(places), _TRIES), islice(spread, _TRIES)):
            if (skipped := _try_cut(text, place, encode)) is not None:
                return place, place + skipped
    return None


def _try_cut(text: str, place: int, encode: EncodeMany) -> int | None:
    """Return the number of characters to leave out at a cut so that both sides can be encoded separately, or None if
    they cannot.
    """
    fits = {0, 1} if text[place] == " " else {0}
    for width in _WIDTHS:
        before, after = text[place - width : place], text[place : place + width]
        whole, left, *rights = encode([before + after, before, *(after[skipped:] for skipped in sorted(fits))])
        fits = {skipped for skipped, right in zip(sorted(fits), rights, strict=True) if left + right == whole}
        if not fits:
            return None
    return min(fits)
