"""The block types of ggml, as a GGUF file holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.quantization.ggml import BLOCK_SIZES, dequantize, stored_bytes
from octavo.quantization.packed.base import RowIndex, check_columns


@dataclass(frozen=True, slots=True)
class GGMLWeight:
    """A tensor of a GGUF file in its own blocks, row after row, as ggml lays them out."""

    type_name: str
    data: NDArray[np.uint8]  # [nbytes], contiguous; may be a read-only view of a mapped file
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        expected = stored_bytes(self.type_name, self.shape)
        if self.data.shape != (expected,):
            raise ValueError(f"{self.type_name} of shape {self.shape} takes {expected} bytes, got {self.data.shape}")

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def column_step(self) -> int:
        return BLOCK_SIZES[self.type_name][0]

    def dequantize(self) -> NDArray[np.float32]:
        return dequantize(self.type_name, self.data, self.shape)

    def rows(self, index: RowIndex) -> GGMLWeight:
        return self._of_blocks(self.blocks()[..., index, :, :])

    def columns(self, begin: int, end: int) -> GGMLWeight:
        check_columns(self, begin, end)
        step = self.column_step
        return self._of_blocks(self.blocks()[..., begin // step : end // step, :])

    def joined(self, parts: Sequence[GGMLWeight], axis: int | None) -> GGMLWeight:
        blocks = [part.blocks() for part in parts]
        return self._of_blocks(np.stack(blocks) if axis is None else np.concatenate(blocks, axis))

    def blocks(self) -> NDArray[np.uint8]:
        """[*shape but the last, blocks a row, bytes a block]"""
        values, size = BLOCK_SIZES[self.type_name]
        return self.data.reshape(*self.shape[:-1], self.shape[-1] // values, size)

    def _of_blocks(self, blocks: NDArray[np.uint8]) -> GGMLWeight:
        shape = (*blocks.shape[:-2], blocks.shape[-2] * self.column_step)
        return GGMLWeight(self.type_name, np.ascontiguousarray(blocks).reshape(-1), shape)
