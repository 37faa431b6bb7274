"""Eight-bit floats with a scale for the tensor, for each row, or for each block of rows and columns.

Source: Micikevicius et al., arXiv 2209.05433. E4M3 has no infinities: its largest number is 448.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from octavo.quantization.packed.base import RowIndex, Weight, check_columns


@dataclass(frozen=True, slots=True)
class Float8Weight(Weight):
    """A weight of eight-bit floats, where a number is data * scale in float32.

    The last block of rows or columns may be shorter.

    block_rows, block_columns: rows and columns that share a scale; None means all of them.
    inputs: `e4m3` if the checkpoint was made for inputs that are rounded to E4M3 (`octavo.quantization.packed.inputs`).
    """

    kind: Literal["E4M3", "E5M2"]
    data: NDArray[np.uint8]  # [*, out, in], the bits of the numbers
    scales: NDArray[np.float32]  # [*, blocks of rows, blocks of columns]
    block_rows: int | None = None
    block_columns: int | None = None
    inputs: Literal["e4m3"] | None = None

    def __post_init__(self) -> None:
        if self.data.ndim < 2:
            raise ValueError(f"{self.type_name} data of shape {list(self.data.shape)} is not a matrix")
        *lead, rows, columns = self.data.shape
        wanted = (*lead, -(-rows // (self.block_rows or rows)), -(-columns // (self.block_columns or columns)))
        if self.scales.shape != wanted:
            raise ValueError(f"scales of {self.type_name} are {list(self.scales.shape)}, not {list(wanted)}")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def type_name(self) -> str:
        """A name such as `F8_E4M3` for a single scale, `F8_E4M3_ROW` for one per row, or `F8_E4M3_128X128` for
        blocks.
        """
        blocks = (self.block_rows, self.block_columns)
        if blocks == (None, None):
            return f"F8_{self.kind}"
        return f"F8_{self.kind}_" + ("ROW" if blocks == (1, None) else "X".join(str(b or "ALL") for b in blocks))

    @property
    def column_step(self) -> int:
        return self.block_columns or 1

    def dequantize(self) -> NDArray[np.float32]:
        values, scales = _values(self.kind)[self.data], self._with_row_scales().scales
        step = self.block_columns or self.shape[-1]
        for block, begin in enumerate(range(0, self.shape[-1], step)):
            values[..., begin : begin + step] *= scales[..., block, None]
        return values

    def rows(self, index: RowIndex) -> Float8Weight:
        """See `Weight.rows`. If the rows cut through blocks, each row gets the scale of its block."""
        step = self.block_rows
        if step is None:
            return replace(self, data=self.data[..., index, :])
        if isinstance(index, slice):
            begin, end, stride = index.indices(self.shape[-2])
            if stride == 1 and begin % step == 0:
                blocks = slice(begin // step, -(-end // step))
                return replace(self, data=self.data[..., index, :], scales=self.scales[..., blocks, :])
        each = self._with_row_scales()
        return replace(each, data=each.data[..., index, :], scales=each.scales[..., index, :])

    def columns(self, begin: int, end: int) -> Float8Weight:
        check_columns(self, begin, end)
        step = self.block_columns
        blocks = slice(None) if step is None else slice(begin // step, -(-end // step))
        return replace(self, data=self.data[..., begin:end], scales=self.scales[..., blocks])

    def joined(self, parts: Sequence[Float8Weight], axis: int | None) -> Float8Weight:
        step = self.block_rows
        if axis is not None and (step is None or any(part.shape[-2] % step for part in parts[:-1])):
            parts = [part._with_row_scales() for part in parts]
        return Weight.joined(parts[0], parts, axis)

    def _with_row_scales(self) -> Float8Weight:
        rows = self.shape[-2]
        scales = np.repeat(self.scales, self.block_rows or rows, axis=-2)[..., :rows, :]
        return replace(self, scales=scales, block_rows=1)


def e4m3_values(data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the numbers that E4M3 bits encode."""
    return _values("E4M3")[data]


@cache
def _values(kind: str) -> NDArray[np.float32]:
    """Return the numbers that the 256 possible bytes of a type encode."""
    bits = np.arange(256, dtype=np.uint16)
    if kind == "E5M2":
        return (bits << 8).view(np.float16).astype(np.float32)
    exponent, mantissa = (bits >> 3 & 15).astype(np.int32), (bits & 7).astype(np.float32)
    magnitude = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(1 + mantissa / 8, exponent - 7))
    magnitude[bits & 127 == 127] = np.nan
    return np.where(bits & 128, -magnitude, magnitude).astype(np.float32)


def e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the bits of the nearest E4M3 numbers, rounding half to even. Magnitudes above 448 become 448."""
    magnitude = np.minimum(np.abs(values), np.float32(448))
    bits = magnitude.view(np.uint32)
    # Three bits of mantissa remain; a carry goes into the exponent, whose bias changes from 127 to 7.
    normal = (bits + np.uint32(0x7FFFF) + (bits >> 20 & 1) >> 20) - np.uint32(120 << 3)
    denormal = np.rint(magnitude * np.float32(512)).astype(np.uint32)
    found: NDArray[np.uint8] = np.where(magnitude < np.float32(2**-6), denormal, normal).astype(np.uint8)
    found |= np.signbit(values).astype(np.uint8) << np.uint8(7)
    return found
