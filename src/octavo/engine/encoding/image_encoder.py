"""The encoder for a model's images. A step encodes several items, and runs in parts if the executor supports that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from octavo.backends import Executor
from octavo.batch import Array, Batch, Float32, StepOutput
from octavo.engine.encoding.row_encoder import Item, RowEncoder
from octavo.media.processor import ImageProcessor
from octavo.models.towers._tower import TowerConfig
from octavo.prompt import MediaItem


class ImageEncoder(RowEncoder):
    """Encodes images into rows.

    tables: weights read on the host.
    max_patches: most patches in one step.
    """

    processor: ImageProcessor

    def __init__(
        self,
        executor: Executor,
        processor: ImageProcessor,
        config: TowerConfig,
        tables: Mapping[str, Array],
        max_patches: int,
    ) -> None:
        super().__init__(executor, max_patches)
        self.processor = processor
        self.config = config
        self._tables = tables

    def _batch_of(self, items: Sequence[Item]) -> Batch:
        images = [item for item in items if isinstance(item, MediaItem)]
        tiles = list(chain.from_iterable(item.layout.tiles for item in images))
        patches = self.config.patches(np.concatenate([self._rows(item) for item in images]))
        further = self.config.inputs(tiles, self._tables)
        none, start = np.zeros(0, np.int32), np.zeros(1, np.int32)
        return Batch(
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

    def _rows_of(self, output: StepOutput) -> Float32:
        return output.values[0]

    def _rows(self, item: MediaItem) -> Float32:
        return self.processor.frame_rows(item.tiles, item.layout.tiles[0].num_frames)
