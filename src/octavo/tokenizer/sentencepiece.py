"""SentencePiece's scores as the merges of a byte-pair encoding.

SentencePiece repeatedly joins the two neighbours whose joined piece has the highest score, the leftmost first. That
is byte-pair encoding with a merge for every way to split every piece in two, ranked by the piece's score.

Source: Kudo and Richardson, "SentencePiece" (2018), and its `bpe_model.cc`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelLoadError

MAX_WORK = 1 << 28  # of the published vocabularies, Gemma's 262,144 tokens need the most, 2^24


def merges_from_scores(
    tokens: Sequence[str], scores: NDArray[np.float64], vocab: Mapping[str, int], unmerged: Collection[str]
) -> list[tuple[str, str]]:
    """The merges in order of priority.

    tokens, scores: [V]; unmerged: tokens that no merge produces (control, unknown, byte and unused ones).
    Among equal scores the longer piece comes first, then the longer left half, so that a run of the same character
    grows from the left as it does in SentencePiece.
    Raises ModelLoadError for tokens so long that splitting them would take seconds.
    """
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    if (work := int((lengths**2).sum())) > MAX_WORK:
        raise ModelLoadError(
            f"the tokens are too long in total: their squared lengths add up to {work}; the limit is {MAX_WORK}"
        )
    merges: list[tuple[str, str]] = []
    for i in np.lexsort((-lengths, -scores)):
        piece = tokens[i]
        if piece in unmerged:
            continue
        for cut in range(len(piece) - 1, 0, -1):
            left = piece[:cut]
            if left in vocab:
                right = piece[cut:]
                if right in vocab:
                    merges.append((left, right))
    return merges
