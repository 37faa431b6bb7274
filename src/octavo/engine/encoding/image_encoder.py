"""The encoder of a model's images: steps of several items, in parts if the executor can."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from octavo.backends import Executor, PartExecutor
from octavo.batch import Array, Batch, Float32
from octavo.media.processor import ImageProcessor
from octavo.models.towers._tower import TowerConfig
from octavo.prompt import MediaItem


@dataclass(slots=True)
class _Step:
    """A step that has begun. done: its first operations, which are computed."""

    items: Sequence[MediaItem]
    batch: Batch
    done: int = 0


class ImageEncoder:
    """Makes rows of items. One step at a time; nothing else may run on the executor's threads meanwhile.

    max_patches: of a step. tables: weights that are read on the host.
    """

    def __init__(
        self,
        executor: Executor,
        processor: ImageProcessor,
        config: TowerConfig,
        tables: Mapping[str, Array],
        max_patches: int,
    ) -> None:
        self.executor = executor
        self.processor = processor
        self.config = config
        self.max_patches = max_patches
        self._tables = tables
        self._step: _Step | None = None

    @property
    def items(self) -> Sequence[MediaItem]:
        """Those of the step that has begun; none: no step has."""
        return () if self._step is None else self._step.items

    def begin(self, items: Sequence[MediaItem]) -> None:
        """Begins a step of items with at most max_patches patches, in place of one that is not done."""
        tiles = list(chain.from_iterable(item.layout.tiles for item in items))
        patches = self.config.patches(np.concatenate([self._rows(item) for item in items]))
        further = self.config.inputs(tiles, self._tables)
        none, start = np.zeros(0, np.int32), np.zeros(1, np.int32)
        batch = Batch(
            token_ids=none,
            positions=none,
            query_start_loc=start,
            seq_lens=none,
            block_tables=np.zeros((1, 0, 0), np.int32),
            slot_mapping=np.zeros((1, 0), np.int32),
            logits_indices=none,
            inputs=(np.ascontiguousarray(patches, np.float32), *further.inputs),
            domains=further.domains,
        )
        self._step = _Step(items, batch)

    def run(self, seconds: float | None) -> list[tuple[MediaItem, Float32]]:
        """Computes for about so long, or to the end. The items with their rows [num_rows, width] once all are done."""
        step = self._step
        assert step is not None, "no step has begun"
        if seconds is None or not isinstance(self.executor, PartExecutor):
            return self._finish(step, self.executor.submit(step.batch).wait().values[0])
        deadline = time.perf_counter() + seconds
        while True:
            output = self.executor.submit_part(step.batch, step.done, step.done + 1).wait()
            step.done += 1
            if step.done == self.executor.num_operations:
                return self._finish(step, output.values[0])
            if time.perf_counter() >= deadline:
                return []

    def drop(self) -> None:
        """Forgets the step that has begun."""
        self._step = None

    def close(self) -> None:
        """Frees weights and memory."""
        self.executor.close()

    def _rows(self, item: MediaItem) -> Float32:
        return self.processor.frame_rows(item.tiles, item.layout.tiles[0].num_frames)

    def _finish(self, step: _Step, rows: Float32) -> list[tuple[MediaItem, Float32]]:
        self._step = None
        found, begin = [], 0
        for item in step.items:
            found.append((item, rows[begin : begin + item.num_rows].copy()))
            begin += item.num_rows
        return found
