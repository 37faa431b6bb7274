"""An executor for a model in parts: each step runs them one after another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, cast

from octavo.backends import AdaptingExecutor, SleepingExecutor
from octavo.backends.moved_blocks import MovedSizes, with_part
from octavo.backends.work_done import WatchedExecutor

if TYPE_CHECKING:
    from octavo.backends import Executor, Paging, PendingStep
    from octavo.backends.split_sizes import SplitSizes
    from octavo.batch import Batch, Float32, StepOutput
    from octavo.graph.ops.low_rank import LowRank
    from octavo.graph.values import Value


class SplitExecutor:
    """Implements `octavo.backends.Executor` over the executors of the parts.

    A step passes through them one after another.

    Values that pass between parts are in main memory, which is pinned if one of the parts is on a GPU. Each layer's
    cache is where the layer is.
    """

    max_in_flight = 1
    settles_drafts = False
    num_stages = 1

    def __init__(self, sizes: SplitSizes, executors: Sequence[Executor]) -> None:
        """executors: one for each part."""
        self.sizes = sizes
        self.executors = tuple(executors)
        self._thread = ThreadPoolExecutor(1, "octavo-split")
        self._num_parts_done = 0
        self._moved = MovedSizes()
        self._ranges: list[tuple[int, int]] = []  # each part's range of a block's bytes
        self._state_ranges = _ranges(part.sizes.cache.moved_state_bytes for part in sizes.parts)
        self.cache_sizes = sizes.cache
        self.workspace_bytes = sum(each.workspace_bytes for each in executors)
        self.weight_bytes = sum(each.weight_bytes for each in executors)
        self.mapped_bytes = sum(each.mapped_bytes for each in executors)
        self.num_threads = max(each.num_threads for each in executors)
        self.paging: Paging | None = next((each.paging for each in executors if each.paging is not None), None)

    def allocate_cache(self, num_blocks: int, block_size: int, num_states: int = 0) -> None:
        self._moved = MovedSizes.of(self.cache_sizes, num_blocks, block_size, num_states)
        self._ranges = _ranges(part.sizes.cache.moved_bytes(block_size) for part in self.sizes.parts)
        for executor in self.executors:
            executor.allocate_cache(num_blocks, block_size, num_states)

    def prepare_adapter(self, parts: Mapping[str, LowRank]) -> list[object]:
        """See `AdaptingExecutor`."""
        return [cast(AdaptingExecutor, each).prepare_adapter(parts) for each in self.executors]

    def load_adapter(self, slot: int, prepared: list[object]) -> None:
        """See `AdaptingExecutor`."""
        for executor, own in zip(self.executors, prepared, strict=True):
            cast(AdaptingExecutor, executor).load_adapter(slot, own)

    def drop_adapter(self, slot: int) -> None:
        """See `AdaptingExecutor`."""
        for executor in self.executors:
            cast(AdaptingExecutor, executor).drop_adapter(slot)

    def submit(self, batch: Batch) -> PendingStep:
        self._moved.check(batch)
        values = dict(zip(self.sizes.parts[0].graph.inputs, batch.inputs, strict=False))  # the part checks their number
        first = self.executors[0].submit(self._batch(0, batch, values))  # also checks the numbers
        return _SplitStep(self._thread.submit(self._run, first, batch, values))

    def _run(self, step: PendingStep, batch: Batch, values: dict[Value, Float32]) -> StepOutput:
        last = len(self.executors) - 1
        for number in range(last):
            outputs = step.wait().values
            self._num_parts_done += 1
            values.update(zip(self.sizes.parts[number].graph.outputs, outputs, strict=True))
            step = self.executors[number + 1].submit(self._batch(number + 1, batch, values))
        return step.wait()

    def _batch(self, number: int, batch: Batch, values: Mapping[Value, Float32]) -> Batch:
        inputs = tuple(values[value] for value in self.sizes.parts[number].graph.inputs)
        batch = with_part(batch, self._ranges[number], self._state_ranges[number])
        if number == len(self.executors) - 1:
            return replace(batch, inputs=inputs)
        return replace(batch, inputs=inputs, sampling=None, return_logits=False)

    def sleep(self) -> None:
        """See `octavo.backends.SleepingExecutor`. The parts on the CPU keep their memory."""
        for executor in self.executors:
            if isinstance(executor, SleepingExecutor):
                executor.sleep()

    def wake_up(self) -> None:
        """See `octavo.backends.SleepingExecutor`."""
        for executor in self.executors:
            if isinstance(executor, SleepingExecutor):
                executor.wake_up()

    def progress(self) -> int:
        """See `octavo.backends.work_done.WatchedExecutor`. A part on the device is counted when it ends."""
        return self._num_parts_done + sum(
            executor.progress() for executor in self.executors if isinstance(executor, WatchedExecutor)
        )

    def close(self) -> None:
        self._thread.shutdown()
        for executor in self.executors:
            executor.close()


def _ranges(sizes: Iterable[int]) -> list[tuple[int, int]]:
    """Return where parts of these sizes begin and end when placed one after another."""
    ends = [*accumulate(sizes)]
    return list(zip([0, *ends], ends, strict=False))


class _SplitStep:
    """Implements `octavo.backends.PendingStep`."""

    def __init__(self, result: Future[StepOutput]) -> None:
        self._result = result

    def wait(self) -> StepOutput:
        return self._result.result()
