"""The vectors of all tokens of a text, one for each: the row consumer of late interaction."""

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
    """Takes the hidden states of all tokens. The vector of the request is theirs, one after the other."""

    kind = RowKind.HIDDEN

    def __init__(self, finish: Finish | None = None) -> None:
        """finish: makes a token's vector of its hidden state."""
        self._finish = finish
        self._rows: list[Float32] = []

    def wanted(self, sequence: Sequence) -> tuple[int, int]:
        return len(self._rows), len(sequence.token_ids)

    def consume(self, uses: list[tuple[RowUse, int]], output: StepOutput) -> Outcome:
        assert output.hidden_states is not None
        ((use, row),) = uses
        for state in output.hidden_states[row : row + use.count].astype(np.float32):
            self._rows.append(state if self._finish is None else self._finish(state))
        if len(self._rows) < len(use.sequence.token_ids):
            return Outcome([])
        return end_with_vector(use.sequence.request, np.concatenate(self._rows), None)
