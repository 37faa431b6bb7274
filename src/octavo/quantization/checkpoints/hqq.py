"""HQQ of the hqq library and transformers. The tensors are self-contained; nothing is read from the configuration.

A number is scale * (code - zero). Zeros may be fractions, so they are converted to minimums, -scale * zero. Before
packing, each row of `W_q` is a group of the matrix's columns. Packing then puts several of these rows into each stored
row, the first ones in the highest bits.
Source: `Quantizer` and `BitPack` of hqq, https://github.com/mobiusml/hqq (now dropbox/hqq).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.models._reading import MAX_WIDTH, ConfigReader
from octavo.quantization.checkpoints._layer import FLOATS, Layer, Lowered, hollow
from octavo.quantization.packed import GroupedWeight, Weight
from octavo.quantization.packed.grouped import packed

METHODS = ("hqq",)

# Name of a packing -> bits of a code, codes in a stored number, its type.
_PACKINGS = {"8bit_u8": (8, 1, "u1"), "4bit_u8": (4, 2, "u1"), "3bit_32": (3, 10, "<i4"), "2bit_u8": (2, 4, "u1")}
_PACKINGS |= {"1bit_u8": (1, 8, "u1")}
_MAX_NAME_BYTES = 16


class Format:
    def __init__(self, config: ConfigReader) -> None:
        """Create the format.

        config: not used.
        """

    def weights(self, layer: Layer) -> Iterator[Lowered]:
        if "W_q" in layer.parts:
            yield _groups(layer)


def _groups(layer: Layer) -> Lowered:
    name = layer.bytes("packing")[:_MAX_NAME_BYTES].tobytes().decode("latin-1")
    if name not in _PACKINGS:
        raise layer.error("packing", f"is {name!r}; supported: {', '.join(_PACKINGS)}")
    bits, per_number, dtype = _PACKINGS[name]
    for part, wanted in (("axis", 1), ("quant_scale", 0), ("quant_zero", 0), ("channel_wise", 1)):
        if part in layer.parts and (found := layer.array(part).reshape(-1)).tolist() != [wanted]:
            raise layer.error(part, f"is {found.tolist()[:2]}; only {wanted} is supported")
    layer.check("shape", (2,), "I64", "I32")
    out, width = (int(size) for size in layer.array("shape"))
    if not (0 < out <= MAX_WIDTH and 0 < width <= MAX_WIDTH):
        raise layer.error("shape", f"is {[out, width]}; it must be two numbers from 1 to {MAX_WIDTH}")
    shape = layer.shape("scale", *FLOATS)
    groups = prod(shape) // out
    if shape != (out * groups, 1) or not groups or width % groups:
        raise layer.error("scale", f"has the shape {list(shape)}; it must be [{out} * groups, 1]")
    layer.check("zero", shape, *FLOATS)
    stored_rows, size = -(-prod(shape) // per_number), width // groups
    if layer.bytes("W_q").nbytes != stored_rows * size * np.dtype(dtype).itemsize:
        raise layer.error("W_q", f"does not hold {out} rows of {width} codes of {bits} bits")
    group, kept_bits = (None if groups == 1 else size), max(bits, 2)

    def codes() -> NDArray[np.uint8]:
        stored = layer.bytes("W_q").view(dtype).reshape(stored_rows, size)
        parts = [(stored >> bits * i & (1 << bits) - 1).astype(np.uint8) for i in reversed(range(per_number))]
        return np.concatenate(parts)[: out * groups].reshape(out, width)

    def make() -> Weight:
        scales: NDArray[Any] = layer.array("scale").reshape(out, groups)
        minima = -scales.astype(np.float32) * layer.array("zero").reshape(out, groups).astype(np.float32)
        return GroupedWeight(kept_bits, group, packed(codes(), kept_bits), scales, minima=minima)

    like = GroupedWeight(
        kept_bits,
        group,
        hollow(out, -(-width * kept_bits // 8)),
        layer.scales_like("scale", out, groups),
        minima=hollow(out, groups, dtype="f4"),
    )
    return layer.lower(like, make)
