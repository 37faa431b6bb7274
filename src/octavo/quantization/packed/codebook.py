"""Four-bit codes that stand for the entries of a table, with a scale for each block of columns: NF4, FP4."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import numpy as np
from numpy.typing import NDArray

from octavo.quantization.packed.base import Weight


@dataclass(frozen=True, slots=True)
class CodebookWeight(Weight):
    """scale * table[code] in float32. A byte has two columns, the first in its low four bits.

    name: of the table, such as `NF4`. table: the numbers of the 16 codes. block: columns with one scale.
    """

    name: str
    table: tuple[float, ...]
    block: int
    codes: NDArray[np.uint8]  # [*, out, in / 2]
    scales: NDArray[np.float16] | NDArray[np.float32]  # [*, out, in / block]

    def __post_init__(self) -> None:
        if len(self.table) != 16:
            raise ValueError(f"the table of {self.name} has {len(self.table)} entries; 16 are needed")
        *rows, width = self.shape
        if width % self.block or self.scales.shape != (*rows, width // self.block):
            raise ValueError(f"scales of {self.type_name} are {list(self.scales.shape)} for {list(self.shape)} numbers")

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
        values *= self.scales[..., None].astype(np.float32)
        return values.reshape(self.shape)
