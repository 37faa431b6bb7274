"""Tensors as files hold them: plain numbers, and the block types of ggml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from octavo.quantization.ggml import BLOCK_SIZES, dequantize, stored_bytes
from octavo.quantization.packed.base import Weight

DENSE_TYPES: Mapping[str, type[np.generic]] = MappingProxyType(
    {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
)
"""Types of plain numbers, and how numpy holds them."""


@dataclass(frozen=True, slots=True)
class DenseWeight(Weight):
    """Plain numbers: float32, float16, or bfloat16 kept as its uint16 bits."""

    data: NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint16]  # [*shape]

    @classmethod
    def from_bytes(cls, type_name: str, data: NDArray[np.uint8], shape: tuple[int, ...]) -> DenseWeight:
        """The numbers of one of `DENSE_TYPES` over their bytes, not copied."""
        return cls(data.view(DENSE_TYPES[type_name]).reshape(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def type_name(self) -> str:
        return {"f4": "F32", "f2": "F16", "u2": "BF16"}[self.data.dtype.str[1:]]

    @property
    def column_step(self) -> int:
        return 1

    def dequantize(self) -> NDArray[np.float32]:
        if self.data.dtype == np.uint16:
            return (self.data.astype(np.uint32) << 16).view(np.float32)
        return self.data.astype(np.float32)


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
