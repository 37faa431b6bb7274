"""The row consumer of late interaction: one vector for each token of a text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from octavo.batch import Float32
from octavo.engine.consumers.pooling import Finish, end_with_vector
from octavo.engine.consumers.row_consumer import Outcome, RowConsumer, RowKind, RowUse
from octavo.engine.request import Sequence

if TYPE_CHECKING:
    from octavo.batch import StepOutput


class TokenVectors(RowConsumer):
    """Takes the hidden states of all tokens. The request's result is the vectors of all tokens in order."""

    kind = RowKind.HIDDEN

    def __init__(self, finish: Finish | None = None) -> None:
        """finish: turns hidden states [tokens, hidden_size] into the vectors of the tokens."""
        self._finish = finish
        self._num_taken = 0
        self._rows: list[Float32] = []

    def wanted(self, sequence: Sequence) -> tuple[int, int]:
        return self._num_taken, len(sequence.token_ids)

    def consume(self, uses: list[tuple[RowUse, int]], output: StepOutput) -> Outcome:
        assert output.hidden_states is not None
        ((use, row),) = uses
        rows = output.hidden_states[row : row + use.count].astype(np.float32)
        self._rows.append(rows if self._finish is None else self._finish(rows))
        self._num_taken += use.count
        if self._num_taken < len(use.sequence.token_ids):
            return Outcome([])
        return end_with_vector(use.sequence.request, np.concatenate(self._rows).ravel(), None)
