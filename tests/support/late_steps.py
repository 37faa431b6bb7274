"""Steps computed late, as on a device: in the order of their calls, at any time until their result is awaited."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.backends import Executor, FinishedStep, PendingStep
from octavo.batch import Batch, Int32, StepOutput

if TYPE_CHECKING:
    from octavo.engine.engine import Engine


class LateStep:
    """A `PendingStep` in a queue of steps that have not been computed yet."""

    def __init__(self, queue: list[LateStep], compute: Callable[[], StepOutput]) -> None:
        self._queue, self._compute = queue, compute
        self._step: FinishedStep | None = None
        queue.append(self)

    def run(self) -> None:
        """Compute all steps up to this one."""
        while self._step is None:
            first = self._queue.pop(0)
            first._step = FinishedStep(first._compute)

    def wait(self) -> StepOutput:
        self.run()
        assert self._step is not None
        return self._step.wait()


def with_tokens(batch: Batch, tokens: Int32) -> Batch:
    """Return the batch with its `token_sources` filled in from the tokens of the previous step."""
    sources = batch.token_sources
    if sources is None:
        return batch
    assert ((sources >= -1) & (sources < len(tokens))).all(), "a token of a row that the step before did not have"
    found = np.where(sources >= 0, tokens[np.maximum(sources, 0)] if len(tokens) else 0, batch.token_ids)
    return replace(batch, token_ids=found.astype(np.int32), token_sources=None)


class LateExecutor:
    """An `octavo.backends.Executor` that wraps another one: two steps in flight, computed whenever it chooses.

    takes_sources: the wrapped executor accepts `Batch.token_sources`; otherwise they are resolved here.
    """

    max_in_flight = 2

    def __init__(self, executor: Executor, seed: int, *, takes_sources: bool) -> None:
        self._executor, self._takes_sources = executor, takes_sources
        self._random = random.Random(seed)
        self._queue: list[LateStep] = []
        self._tokens = np.zeros(0, np.int32)
        self.num_ahead = 0  # steps that took tokens of the one before
        self.num_late = 0  # of these, those that did so before it was known which guesses were right

    def beside(self, executor: Executor) -> LateExecutor:
        """Return another executor on the same device, whose steps stay in order with those of this one."""
        other = LateExecutor(executor, 1, takes_sources=self._takes_sources)
        other._queue, other._random = self._queue, self._random
        return other

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def submit(self, batch: Batch) -> PendingStep:
        self.num_ahead += batch.token_sources is not None
        self.num_late += batch.late is not None
        step = LateStep(self._queue, lambda: self._compute(batch))
        if self._random.random() < 0.5:
            self._queue[self._random.randrange(len(self._queue))].run()
        return step

    def _compute(self, batch: Batch) -> StepOutput:
        if not self._takes_sources:
            batch = with_tokens(batch, self._tokens)
        self._tokens = np.zeros(len(batch.logits_indices), np.int32)
        output = self._executor.submit(batch).wait()
        if batch.sampling is not None:
            self._tokens = output.token_ids
        return output


def on_late_device(engine: Engine, seed: int = 1) -> tuple[LateExecutor, LateExecutor]:
    """Put a model and its draft model, which share tokens, on one device with two steps in flight."""
    assert engine.speculation is not None
    drafter = engine.speculation.drafter
    assert drafter is not None
    assert drafter.is_on_device
    engine.executor = late = LateExecutor(engine.executor, seed, takes_sources=True)
    drafter.executor = draft = late.beside(drafter.executor)
    return late, draft
