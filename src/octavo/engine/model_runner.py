"""Runs one scheduled step on an executor."""

from __future__ import annotations

from octavo.backends import Executor
from octavo.batch import StepOutput
from octavo.engine.batch_builder import BatchBuilder
from octavo.engine.scheduler import Schedule


class ModelRunner:
    """An executor and the tables that a step's arrays are gathered from."""

    def __init__(self, executor: Executor, batch_builder: BatchBuilder) -> None:
        self.executor = executor
        self._batch_builder = batch_builder

    def execute(self, schedule: Schedule) -> StepOutput:
        """Copies the blocks that would be shared and written, then computes and samples. One native call."""
        scheduled = list(schedule.scheduled.values())
        copies = [item.copy for item in scheduled if item.copy is not None]
        if copies:
            self.executor.copy_blocks(copies)
        return self.executor.execute(self._batch_builder.build(scheduled))
