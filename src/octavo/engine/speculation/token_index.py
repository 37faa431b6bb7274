"""Finds the place in a text that best matches the text's end."""

from __future__ import annotations

from typing import NamedTuple

from octavo.speculative_config import MAX_MATCH

_MIN_MATCH = 2  # tokens; a single one predicts the next too poorly
_MAX_PLACES = 8  # places compared, the latest first


class Match(NamedTuple):
    """A place in a list of tokens where the preceding tokens equal the last tokens of a text.

    end: position of the token that follows.
    length: number of matching tokens.
    """

    end: int
    length: int


class TokenIndex:
    """The positions of all token pairs in a growing list, each linked to the previous one.

    Each token costs one entry, and a search compares only a few places.
    """

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids
        self._latest: dict[int, int] = {}  # pair -> position after its latest occurrence
        self._earlier: list[int] = [-1] * _MIN_MATCH  # position -> position after the previous occurrence; -1 if none
        # Only places followed by a token.

    def extend(self) -> None:
        """Index tokens that were added to the list."""
        token_ids, latest, earlier = self._token_ids, self._latest, self._earlier
        for end in range(len(earlier), len(token_ids)):
            pair = token_ids[end - 2] << 32 | token_ids[end - 1]
            earlier.append(latest.get(pair, -1))
            latest[pair] = end

    def find(self, text: list[int]) -> Match | None:
        """Return the place with the longest match for the end of `text`, or None. Of equal ones, return the latest."""
        if len(text) < _MIN_MATCH:
            return None
        token_ids, best = self._token_ids, Match(-1, 0)
        end, depth = self._latest.get(text[-2] << 32 | text[-1], -1), min(len(text), MAX_MATCH)
        tail = text[-depth:]
        for _ in range(_MAX_PLACES):
            if end < 0 or best.length == depth:
                break
            if end >= depth and token_ids[end - depth : end] == tail:  # the usual case in repetitive text
                length = depth
            else:
                length, most = _MIN_MATCH, min(depth, end)
                while length < most and token_ids[end - 1 - length] == text[-1 - length]:
                    length += 1
            if length > best.length:
                best = Match(end, length)
            end = self._earlier[end]
        return best if best.length else None


def levels_from(length: int, count: int, longest: int = MAX_MATCH) -> list[int]:
    """Return the number of tokens that match before each of `count` guesses, at most `longest`.

    length: number of tokens that match before the first guess.
    """
    rising = range(length, min(length + count, longest))
    return [*rising, *[longest] * (count - len(rising))]
