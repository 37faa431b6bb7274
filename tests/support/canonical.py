"""Small random canonical weights, for tests of the code that packs and multiplies them."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from octavo.quantization.packed import GroupedWeight

Mins = Literal["zero", "zeros", "minima"]


def packed_bits(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Pack the codes of each row without gaps, starting with the lowest bits."""
    stream = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little")
    return np.packbits(stream.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")


def random_grouped(
    shape: tuple[int, ...],
    seed: int,
    *,
    bits: int = 4,
    group: int | None = 128,
    mins: Mins = "zero",
    dtype: type[np.floating] = np.float16,
    zero: int | None = None,
) -> GroupedWeight:
    """Make a random weight that uses all codes. zero: the code of zero where `mins` is "zero"; None for the middle
    code.
    """
    rng = np.random.default_rng(seed)
    *lead, width = shape
    per_group = (*lead, width // (group or width))
    top = 1 << bits
    scales = (rng.uniform(0.5, 1.5, per_group) * rng.choice([-1, 1], per_group) / top).astype(dtype)
    return GroupedWeight(
        bits,
        group,
        packed_bits(rng.integers(0, top, shape, dtype=np.uint8), bits),
        scales,
        zero=(top // 2 if zero is None else zero) if mins == "zero" else 0,
        zeros=rng.integers(0, top, per_group).astype(np.uint8) if mins == "zeros" else None,
        minima=(-scales * (top / 2) + rng.normal(0, 0.1, per_group)).astype(dtype) if mins == "minima" else None,
    )
