"""Four-bit codes that index a table, with a scale for each block of columns: NF4, FP4, NVFP4."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import numpy as np
from numpy.typing import NDArray

from octavo.quantization.packed.base import Weight
from octavo.quantization.packed.float8 import e4m3_values


@dataclass(frozen=True, slots=True)
class CodebookWeight(Weight):
    """A weight of four-bit codes, where a number is scale * table[code] in float32.

    A byte has two columns, the first in its low four bits.

    name: name of the table, such as `NF4`.
    table: the numbers of the 16 codes.
    block: number of columns that share a scale. With row_scales, the scales are the bits of E4M3 numbers, each to be
        multiplied by the scale of its row.
    """

    name: str
    table: tuple[float, ...]
    block: int
    codes: NDArray[np.uint8]  # [*, out, in / 2]
    scales: NDArray[np.float16] | NDArray[np.float32] | NDArray[np.uint8]  # [*, out, in / block]
    row_scales: NDArray[np.float32] | None = None  # [*, out, 1]

    def __post_init__(self) -> None:
        if len(self.table) != 16:
            raise ValueError(f"the table of {self.name} has {len(self.table)} entries; 16 are needed")
        *rows, width = self.shape
        if width % self.block or self.scales.shape != (*rows, width // self.block):
            raise ValueError(f"scales of {self.type_name} are {list(self.scales.shape)} for {list(self.shape)} numbers")
        if (self.row_scales is not None) != (self.scales.dtype == np.uint8):
            raise ValueError(f"E4M3 scales of {self.type_name} need scales of the rows, and other scales have none")
        if self.row_scales is not None and self.row_scales.shape != (*rows, 1):
            raise ValueError(f"scales of rows of {self.type_name} are {list(self.row_scales.shape)}, not {[*rows, 1]}")

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 2)

    @property
    def type_name(self) -> str:
        return f"{self.name}_{self.block}"

    @property
    def column_step(self) -> int:
        return lcm(self.block, 2)

    def dequantize(self) -> NDArray[np.float32]:
        codes = np.stack([self.codes & 15, self.codes >> 4], axis=-1)
        values = np.asarray(self.table, np.float32)[codes].reshape(*self.scales.shape, -1)
        if self.row_scales is None:
            scales = self.scales.astype(np.float32)
        else:
            scales = e4m3_values(self.scales.view(np.uint8)) * self.row_scales
        values *= scales[..., None]
        return values.reshape(self.shape)
