"""An encoder whose rows become part of prompts.

A step encodes several items, and runs in parts if the executor supports that.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.backends import Executor, PartExecutor
from octavo.batch import Batch, Float32, StepOutput
from octavo.prompt import MediaItem, SourceText

if TYPE_CHECKING:
    from octavo.media.processor import ImageProcessor

Item = MediaItem | SourceText


@dataclass(slots=True)
class _Step:
    """A step that has begun.

    done: number of operations already computed.
    """

    items: Sequence[Item]
    batch: Batch
    done: int = 0


class RowEncoder(ABC):
    """Encodes items into rows, one step at a time. Nothing else may run on the executor's threads meanwhile.

    max_inputs: limit for the items of a step (`Item.num_inputs`).
    processor: the image processor, or None if the encoder reads no images.
    """

    processor: ImageProcessor | None = None

    def __init__(self, executor: Executor, max_inputs: int) -> None:
        self.executor = executor
        self.max_inputs = max_inputs
        self._step: _Step | None = None

    @property
    def items(self) -> Sequence[Item]:
        """The items of the current step, empty if none has begun."""
        return () if self._step is None else self._step.items

    def begin(self, items: Sequence[Item]) -> None:
        """Begin a step for items with at most max_inputs inputs, replacing an unfinished one."""
        self._step = _Step(items, self._batch_of(items))

    def run(self, seconds: float | None) -> list[tuple[Item, Float32]]:
        """Compute for about `seconds`, or to the end. Return the items and rows [num_rows, width] once all are done."""
        step = self._step
        assert step is not None, "no step has begun"
        if seconds is None or not isinstance(self.executor, PartExecutor):
            return self._finish(step, self.executor.submit(step.batch).wait())
        deadline = time.perf_counter() + seconds
        while True:
            output = self.executor.submit_part(step.batch, step.done, step.done + 1).wait()
            step.done += 1
            if step.done == self.executor.num_operations:
                return self._finish(step, output)
            if time.perf_counter() >= deadline:
                return []

    def drop(self) -> None:
        """Discard the current step."""
        self._step = None

    def close(self) -> None:
        """Free weights and memory."""
        self.executor.close()

    @abstractmethod
    def _batch_of(self, items: Sequence[Item]) -> Batch:
        """Return the batch of a step with these items."""

    @abstractmethod
    def _rows_of(self, output: StepOutput) -> Float32:
        """Return the rows of all items, in order."""

    def _finish(self, step: _Step, output: StepOutput) -> list[tuple[Item, Float32]]:
        self._step = None
        rows, found, begin = self._rows_of(output), [], 0
        for item in step.items:
            found.append((item, rows[begin : begin + item.num_rows].copy()))
            begin += item.num_rows
        return found
