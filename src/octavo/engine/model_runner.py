"""Runs one scheduled step on an executor."""

from __future__ import annotations

from octavo.backends import Executor, PendingStep
from octavo.batch import Batch
from octavo.engine.batch_builder import BatchBuilder
from octavo.engine.schedule import Schedule


class ModelRunner:
    """An executor, and the tables from which the arrays of a step are gathered."""

    def __init__(self, executor: Executor, batch_builder: BatchBuilder) -> None:
        self.executor = executor
        self._batch_builder = batch_builder

    def build(self, schedule: Schedule) -> Batch:
        """The arrays of a step."""
        return self._batch_builder.build(schedule)

    def submit(self, batch: Batch) -> PendingStep:
        """Starts the step with one native call."""
        return self.executor.submit(batch)
