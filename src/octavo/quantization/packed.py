"""The canonical weights that every checkpoint format is lowered to when it is loaded.

A format file turns its own packing into one of these and knows nothing about devices;
a backend packs these for its kernels and knows nothing about formats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from octavo.quantization.ggml import dequantize, stored_bytes


@runtime_checkable
class Weight(Protocol):
    """A weight as stored, with its numpy meaning."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape: [out_features, in_features], [experts, out, in] or [features]."""

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""

    @property
    def type_name(self) -> str:
        """The type as the field writes it: `F32`, `BF16`, `Q4_K`, ..."""

    def dequantize(self) -> NDArray[np.float32]:
        """The meaning: float32 of `shape`."""


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """Plain numbers: float32, float16, or bfloat16 kept as its uint16 bits."""

    data: NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint16]  # [*shape]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def type_name(self) -> str:
        return {"f4": "F32", "f2": "F16", "u2": "BF16"}[self.data.dtype.str[1:]]

    def dequantize(self) -> NDArray[np.float32]:
        if self.data.dtype == np.uint16:
            return (self.data.astype(np.uint32) << 16).view(np.float32)
        return self.data.astype(np.float32)


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

    def dequantize(self) -> NDArray[np.float32]:
        return dequantize(self.type_name, self.data, self.shape)
