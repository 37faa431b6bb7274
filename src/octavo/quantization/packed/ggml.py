"""The block types of ggml, as a GGUF file holds them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.quantization.ggml import BLOCK_SIZES, dequantize, stored_bytes
from octavo.quantization.packed.base import Weight


@dataclass(frozen=True, slots=True)
class GGMLWeight(Weight):
    """A tensor of a GGUF file in its own blocks, row after row, as ggml lays them out."""

    type_name: str = field()  # without `field()` the base's property would become the default
    data: NDArray[np.uint8]  # [*rows, bytes of a row]; may be a read-only view of a mapped file

    @classmethod
    def from_bytes(cls, type_name: str, data: NDArray[np.uint8], shape: tuple[int, ...]) -> GGMLWeight:
        """The tensor of this shape over its bytes, not copied."""
        expected = stored_bytes(type_name, shape)
        if data.size != expected:
            raise ValueError(f"{type_name} of shape {shape} takes {expected} bytes, got {data.size}")
        return cls(type_name, data.reshape(*shape[:-1], stored_bytes(type_name, shape[-1:])))

    @property
    def shape(self) -> tuple[int, ...]:
        values, size = BLOCK_SIZES[self.type_name]
        return (*self.data.shape[:-1], self.data.shape[-1] // size * values)

    @property
    def column_step(self) -> int:
        return BLOCK_SIZES[self.type_name][0]

    def dequantize(self) -> NDArray[np.float32]:
        return dequantize(self.type_name, self.data, self.shape)
