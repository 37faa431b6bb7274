"""Pools hidden states into vectors, and ends each request with its vector."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from octavo.batch import Float32
from octavo.engine.consumers.row_consumer import Outcome, RowConsumer, RowKind, RowUse
from octavo.engine.request import FinishReason, Request, Sequence
from octavo.errors import NumericalError
from octavo.generation_request import Pooling

if TYPE_CHECKING:
    from octavo.batch import StepOutput

# Turns a text's vector, or [tokens, hidden_size], into the result: unit vectors or a score.
Finish: TypeAlias = Callable[[Float32], Float32]


class Pooler(RowConsumer):
    """Pools the hidden states of a prompt into one vector, [hidden_size]."""

    kind = RowKind.HIDDEN

    def __init__(self, pooling: Pooling, finish: Finish | None = None) -> None:
        self._pools_all = pooling == "mean"
        self._finish = finish
        self._num_taken = 0
        self._total: NDArray[np.float64] | None = None

    def wanted(self, sequence: Sequence) -> tuple[int, int]:
        num_tokens = len(sequence.token_ids)
        return (self._num_taken if self._pools_all else num_tokens - 1), num_tokens

    def consume(self, uses: list[tuple[RowUse, int]], output: StepOutput) -> Outcome:
        assert output.hidden_states is not None
        ((use, row),) = uses
        added = output.hidden_states[row : row + use.count].sum(axis=0, dtype=np.float64)
        self._total = added if self._total is None else self._total + added
        self._num_taken += use.count
        if use.start + use.count < len(use.sequence.token_ids):
            return Outcome([])
        return end_with_vector(use.sequence.request, (self._total / self._num_taken).astype(np.float32), self._finish)


def normalized(vector: Float32) -> Float32:
    """Scale vectors, [..., width], to length 1. A zero vector stays zero."""
    lengths = np.sqrt((vector[..., None, :] @ vector[..., None])[..., 0])  # one dot product per vector
    unit: Float32 = (vector / np.where(lengths == 0, np.float32(1), lengths)).astype(np.float32)
    return unit


def end_with_vector(request: Request, vector: Float32, finish: Finish | None) -> Outcome:
    """Finish a request with its vector, or with an error if the vector is not finite. The outcome ends its group."""
    if finish is not None and np.isfinite(vector).all():
        vector = finish(vector)
    request.vector = vector
    if not np.isfinite(vector).all():
        request.error = NumericalError(f"{request.request_id} failed: its hidden states are not finite")
    return Outcome([], finish=FinishReason.STOP)
