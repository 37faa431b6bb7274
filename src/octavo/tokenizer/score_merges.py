"""SentencePiece's merges by score, for vocabularies where several pieces have the same score.

Among all neighbours whose joined piece has the highest score, the leftmost pair is joined first. A byte-pair encoding
with a ranked list of merges cannot express that, because its ranks put one of two equal pieces first everywhere.
Source: `bpe_model.cc` of SentencePiece.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScoreMerges:
    """Joins pieces by score.

    merges: (left id, right id) -> (score, id of the joined piece)
    """

    merges: Mapping[tuple[int, int], tuple[float, int]]

    def join(self, ids: Sequence[int]) -> list[int]:
        """Return the ids of a text, given the ids of its characters. Tokens without merges are kept. Takes O(n log n)
        time.
        """
        pieces, end = list(ids), len(ids)
        before, after = list(range(-1, end - 1)), list(range(1, end + 1))
        # (minus the score, position of the left piece, both pieces, the joined piece). Outdated entries are skipped.
        queue: list[tuple[float, int, int, int, int]] = []

        def propose(left: int, right: int) -> None:
            if left >= 0 and right < end and (found := self.merges.get((pieces[left], pieces[right]))) is not None:
                heapq.heappush(queue, (-found[0], left, pieces[left], pieces[right], found[1]))

        for left in range(end - 1):
            propose(left, left + 1)
        while queue:
            _, left, first, second, joined = heapq.heappop(queue)
            right = after[left]
            if pieces[left] != first or right >= end or pieces[right] != second:
                continue
            pieces[left], pieces[right] = joined, -1
            after[left] = after[right]
            if after[left] < end:
                before[after[left]] = left
            propose(before[left], left)
            propose(left, after[left])
        return [piece for piece in pieces if piece >= 0]
