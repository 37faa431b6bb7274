"""The row consumer for models that pool by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from octavo.engine.consumers.pooling import Finish, end_with_vector
from octavo.engine.consumers.row_consumer import Outcome, RowConsumer, RowKind, RowUse
from octavo.engine.request import Sequence
from octavo.generation_request import Pooling

if TYPE_CHECKING:
    from octavo.batch import StepOutput


class RowTaker(RowConsumer):
    """Takes the single row that the graph returns per text: a vector [hidden_size], or a head's labels."""

    kind = RowKind.HIDDEN

    def __init__(self, pooling: Pooling, finish: Finish | None = None) -> None:
        """pooling: the graph's pooling. The row belongs to the first token for cls, otherwise to the last."""
        self._takes_first = pooling == "cls"
        self._finish = finish

    def wanted(self, sequence: Sequence) -> tuple[int, int]:
        position = 0 if self._takes_first else len(sequence.token_ids) - 1
        return position, position + 1

    def consume(self, uses: list[tuple[RowUse, int]], output: StepOutput) -> Outcome:
        assert output.hidden_states is not None
        ((use, row),) = uses
        return end_with_vector(use.sequence.request, output.hidden_states[row].astype(np.float32), self._finish)
