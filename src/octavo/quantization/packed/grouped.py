"""Integers of few bits with a scale for each group of columns: GPTQ, AWQ, int8 per row."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, lcm
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from octavo.quantization.ggml_blocks import fields
from octavo.quantization.packed.base import Weight

Scales = NDArray[np.float16] | NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class GroupedWeight(Weight):
    """A weight of integer codes. A number is scale * (code - zero) or, with minima, scale * code + minimum, in float32.

    bits: bits of a code, 2 to 8.
    group: number of columns that share a scale, a power of two; None means the whole row.
    zero: the code of the number zero, if it is the same for all groups.
    inputs: `int8` if the checkpoint was made for inputs that are rounded to int8 (`octavo.quantization.packed.inputs`).

    The codes of a row follow each other without gaps, from the lowest bits up. Column j of the codes is column
    column_order[j] of the weight.
    """

    bits: int
    group: int | None
    codes: NDArray[np.uint8]  # [*, out, in * bits / 8]
    scales: Scales  # [*, out, groups]
    zero: int = 0
    zeros: NDArray[np.uint8] | None = None  # [*, out, groups], instead of `zero`
    minima: Scales | None = None  # [*, out, groups], instead of zeros
    column_order: NDArray[np.int32] | None = None  # [*, in]
    inputs: Literal["int8"] | None = None

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ValueError(f"codes have {self.bits} bits; they must have 2 to 8")
        if self.group is not None and (self.group < 1 or self.group & (self.group - 1)):
            raise ValueError(f"groups have {self.group} columns; it must be a power of two")
        width = self.shape[-1]
        if self.codes.shape[-1] * 8 != width * self.bits or width % (self.group or width):
            raise ValueError(
                f"a row of {self.codes.shape[-1]} bytes is not a whole number of groups of {self.type_name}"
            )
        wanted = (*self.codes.shape[:-1], width // (self.group or width))
        for name, array in (("scales", self.scales), ("zeros", self.zeros), ("minima", self.minima)):
            if array is not None and array.shape != wanted:
                raise ValueError(f"{name} of {self.type_name} are {list(array.shape)}, not {list(wanted)}")
        if self.zeros is not None and self.minima is not None:
            raise ValueError("a grouped weight has zeros or minima, not both")
        order = self.column_order
        if order is not None and order.shape != (*self.codes.shape[:-2], width):
            raise ValueError(f"the column order is {list(order.shape)} for {width} columns")

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 8 // self.bits)

    @property
    def type_name(self) -> str:
        """A name such as `I4_128` or `I8_ROW`; `_Z` marks zeros, `_M` minima, `_F32` float32 scales, `_ORDER` a column
        order.
        """
        is_float32 = np.float32 in (self.scales.dtype, None if self.minima is None else self.minima.dtype)
        marks = {
            "Z": self.zeros is not None,
            "M": self.minima is not None,
            "F32": is_float32,
            "ORDER": self.column_order is not None,
        }
        names = [f"I{self.bits}", str(self.group or "ROW")]
        return "_".join(names + [mark for mark, is_set in marks.items() if is_set])

    @property
    def column_step(self) -> int:
        if self.column_order is not None:
            return self.shape[-1]
        return lcm(self.group or 1, 8 // gcd(8, self.bits))

    def dequantize(self) -> NDArray[np.float32]:
        values = unpacked(self.codes, self.bits)
        grouped = values.reshape(*self.scales.shape, -1).astype(np.float32)
        if self.minima is None:
            grouped -= np.float32(self.zero) if self.zeros is None else self.zeros[..., None].astype(np.float32)
        grouped *= self.scales[..., None].astype(np.float32)
        if self.minima is not None:
            grouped += self.minima[..., None].astype(np.float32)
        out = grouped.reshape(self.shape)
        if self.column_order is None:
            return out
        ordered = np.empty_like(out)
        np.put_along_axis(ordered, np.broadcast_to(self.column_order[..., None, :], out.shape), out, -1)
        return ordered


def unpacked(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Unpack the codes of each row to one per byte: [*, in * bits / 8] -> [*, in]."""
    if 8 % bits == 0:
        return fields(codes, bits)
    stream = np.unpackbits(codes, axis=-1, bitorder="little").reshape(*codes.shape[:-1], -1, bits)
    values: NDArray[np.uint8] = stream @ (1 << np.arange(bits)).astype(np.uint8)
    return values


def packed(values: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Pack the codes of each row without gaps: [*, in] -> [*, in * bits / 8]. The inverse of `unpacked`."""
    if bits == 8:
        return values
    stream = np.unpackbits(values[..., None], axis=-1, count=bits, bitorder="little")
    return np.packbits(stream.reshape(*values.shape[:-1], -1), axis=-1, bitorder="little")
