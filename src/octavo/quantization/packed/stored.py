"""Tensors as files hold them: plain numbers, and the block types of ggml."""

from __future__ import annotations

import re
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
"""Types of plain numbers -> numpy types that store them."""

_CHUNK_VALUES = 1 << 20


_HALF_TO_SINGLE = np.float32(2.0**112)  # between the biases of the exponents
_BEYOND_HALVES = np.float32(65536)


def _from_halves(data: NDArray[np.float16]) -> NDArray[np.float32]:
    """Return data.astype(float32) in half the time, by moving sign, exponent and mantissa to their places.

    A multiplication then corrects the exponent's bias, including that of subnormal numbers. Arrays with infinity or NaN
    are converted by numpy instead, because these numbers would become finite.
    """
    bits = np.asarray(data).view(np.int16).astype(np.int32, order="C")
    np.left_shift(bits, 13, out=bits)
    np.bitwise_and(bits, np.int32(-0x70000001), out=bits)  # the copies of the sign below it
    values = bits.view(np.float32)
    np.multiply(values, _HALF_TO_SINGLE, out=values)
    if values.size and (values.max() >= _BEYOND_HALVES or values.min() <= -_BEYOND_HALVES):
        return data.astype(np.float32)
    return values


@dataclass(frozen=True, slots=True)
class DenseWeight(Weight):
    """Plain numbers: float32, float16, or bfloat16 kept as its uint16 bits."""

    data: NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint16]  # [*shape]

    @classmethod
    def from_bytes(cls, type_name: str, data: NDArray[np.uint8], shape: tuple[int, ...]) -> DenseWeight:
        """Return the numbers of one of `DENSE_TYPES` as a view of their bytes, without copying."""
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
        if self.data.dtype == np.float16:
            return _from_halves(self.data.view(np.float16))
        return self.data.astype(np.float32)

    def converted(self, type_name: str) -> DenseWeight:
        """Return the numbers in another of `DENSE_TYPES`, rounded to the nearest, halves to even.

        They are converted in chunks, so temporaries stay small. Raises ValueError if a finite number becomes infinite.
        """
        flat = DenseWeight(self.data.reshape(-1))
        out = np.empty(flat.shape, DENSE_TYPES[type_name])
        for begin in range(0, out.size, _CHUNK_VALUES):
            values = flat.rows(slice(begin, begin + _CHUNK_VALUES)).dequantize()
            with np.errstate(over="ignore"):
                found = bfloat16(values) if type_name == "BF16" else values.astype(out.dtype)
            is_finite = np.isfinite(values)
            if not np.isfinite(DenseWeight(found).dequantize()[is_finite]).all():
                largest = np.abs(values[is_finite]).max()
                raise ValueError(f"its numbers reach {largest:g}, which {type_name} cannot represent; use float32")
            out[begin : begin + _CHUNK_VALUES] = found
        return DenseWeight(out.reshape(self.shape))


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the bits of the nearest bfloat16 numbers."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    # Rounding could carry a NaN into infinity; it keeps its upper half, made quiet.
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)


def group_of(type_name: str) -> str:
    """Return, in words, the group of numbers that share a scale: `64`, `row`, `128x128` or `tensor`.

    For ggml's types it is the size of a block, and for plain numbers `-`.
    """
    if type_name in DENSE_TYPES:
        return "-"
    if type_name in BLOCK_SIZES:
        return str(BLOCK_SIZES[type_name][0])
    found = re.search(r"_(ROW|(?:ALL|\d+)X(?:ALL|\d+)|\d+)(?=_|$)", type_name)
    return found[1].lower() if found else "tensor"


@dataclass(frozen=True, slots=True)
class GGMLWeight(Weight):
    """A tensor of a GGUF file in its original blocks, row after row, in ggml's layout."""

    type_name: str = field()  # without `field()` the base's property would become the default
    data: NDArray[np.uint8]  # [*rows, bytes of a row]; may be a read-only view of a mapped file

    @classmethod
    def from_bytes(cls, type_name: str, data: NDArray[np.uint8], shape: tuple[int, ...]) -> GGMLWeight:
        """Return the tensor of this shape as a view of its bytes, without copying."""
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
