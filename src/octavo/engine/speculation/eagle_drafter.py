"""Drafts from an EAGLE-3 head: a layer trained for a model, which reads hidden states of three of its layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from octavo.engine.speculation.draft_source import EAGLE3
from octavo.engine.speculation.head_drafter import HeadDrafter

if TYPE_CHECKING:
    from octavo.backends import Executor
    from octavo.batch import Float32, StepOutput
    from octavo.engine.limits import EngineLimits
    from octavo.engine.loading.draft_head import DraftHead
    from octavo.engine.step_times import StepTimes


class EagleDrafter(HeadDrafter):
    """A head with two inputs: the model's hidden states for computed tokens, and its own hidden states for guesses.

    Its logits may cover fewer tokens than the model's.
    """

    name = EAGLE3

    def __init__(
        self,
        executor: Executor,
        times: StepTimes,
        limits: EngineLimits,
        max_drafts: int,
        head: DraftHead,
        group: int = 0,
    ) -> None:
        super().__init__(executor, times, limits, max_drafts, group)
        self._head = head

    def _hidden_of(self, output: StepOutput) -> Float32 | None:
        return output.taps

    def _inputs(self, rows: Float32, *, are_own: bool) -> tuple[Float32, ...]:
        """Return the model's hidden states and the head's own. One of them is all zeros, because the head adds both.

        The head's first layer adds its bias to this sum, although the bias belongs only to the model's hidden states,
        so it is subtracted from the head's own.
        """
        of_model, own = (np.zeros((len(rows), columns), np.float32) for columns in self._head.columns)
        if not are_own:
            return rows, own
        return of_model, rows if self._head.bias is None else rows - self._head.bias

    def _token_of(self, row: int) -> int:
        ids = self._head.target_ids
        return row if ids is None else int(ids[row])
