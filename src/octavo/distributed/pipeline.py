"""Steps on their way through the stages of a pipeline. At any time, each stage computes a different step."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.distributed.rank_messages import StageValues

if TYPE_CHECKING:
    from octavo.backends import Executor
    from octavo.batch import Batch, StepOutput
    from octavo.distributed.leader import Leader
    from octavo.distributed.ranks import Ranks


class PipelinedStep:
    """A step that has been sent to the first stage. Implements `octavo.backends.PendingStep`."""

    def __init__(self, number: int, batch: Batch, gather: Callable[[int], None]) -> None:
        """batch: this rank's batch.
        gather: receives the blocks that the step saved on another rank, if any, given the rank's number.
        """
        self.number = number
        self.batch = batch
        self.gather = gather
        self._ended = threading.Event()
        self._output: StepOutput | None = None
        self._error: BaseException | None = None

    def end(self, result: StepOutput | BaseException) -> None:
        if isinstance(result, BaseException):
            self._error = result
        else:
            self._output = result
        self._ended.set()

    def wait(self) -> StepOutput:
        self._ended.wait()
        if self._error is not None:
            raise self._error
        assert self._output is not None
        return self._output


class Pipeline:
    """Passes the values of each stage to the next one, with a thread per boundary. The last stage runs here."""

    def __init__(
        self, local: Executor, leader: Leader, ranks: Ranks, outcome: Callable[[Callable[[], StepOutput]], StepOutput]
    ) -> None:
        """outcome: calls its argument and returns the result. It replaces the error if a rank is gone."""
        self._local, self._leader, self._ranks, self._outcome = local, leader, ranks, outcome
        self._queues: list[queue.SimpleQueue[PipelinedStep | None]] = [
            queue.SimpleQueue() for _ in range(ranks.pipeline_parallel - 1)
        ]
        self._threads = [
            threading.Thread(target=self._run, args=(stage,), name=f"octavo-stage-{stage}", daemon=True)
            for stage in range(len(self._queues))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, step: PipelinedStep) -> None:
        """Pass a step that has been sent to all ranks from stage to stage. The batch must not change until the step
        ends.
        """
        self._queues[0].put(step)

    def close(self) -> None:
        """Wait for the steps in flight."""
        self._queues[0].put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, stage: int) -> None:
        """Move steps over the boundary after `stage`, in order."""
        is_last = stage == len(self._queues) - 1
        while (step := self._queues[stage].get()) is not None:
            if self._move(step, stage) and not is_last:
                self._queues[stage + 1].put(step)
        if not is_last:
            self._queues[stage + 1].put(None)

    def _move(self, step: PipelinedStep, stage: int) -> bool:
        """Move a step over the boundary after `stage`. Return False if the step has ended with an error."""
        try:
            values = self._values(stage, step)
            if stage == len(self._queues) - 1:
                step.end(self._outcome(lambda: self._end(step, values)))
        except BaseException as error:
            step.end(error)
            return False
        return True

    def _values(self, stage: int, step: PipelinedStep) -> StageValues:
        """Return the stage's values. They are also sent to the next stage's ranks on other machines."""
        first, number = self._ranks.of_stage(stage)[0], step.number
        step.gather(first)
        values = self._leader.receive(first, StageValues)
        if values.number != number:
            self._leader.fail(first, f"it is at step {values.number} instead of {number}")
            self._leader.check()
        self._leader.send(values, [rank for rank in self._ranks.of_stage(stage + 1) if rank > 0])
        return values

    def _end(self, step: PipelinedStep, values: StageValues) -> StepOutput:
        inputs = tuple(tensor.array() for tensor in values.arrays)
        senders = {self._ranks.of_stage(stage)[0] for stage in range(len(self._queues))}
        try:
            return self._local.submit(replace(step.batch, inputs=inputs)).wait()
        finally:  # also if a row has no outcome
            for rank in range(1, self._ranks.count):
                if rank not in senders:
                    step.gather(rank)
