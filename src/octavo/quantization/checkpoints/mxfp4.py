"""MXFP4 of gpt-oss: experts in blocks of 32 columns, with a power of two for each block.

`NAME_blocks` [experts, out, in / 32, 16] has two columns per byte, the first in the low four bits. `NAME_scales`
[experts, out, in / 32] has the exponents. They become `NAME.weight`, [experts, out, in], with the rows in stored order.
In `gate_up_proj`, rows of gate and up alternate; the architecture splits them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from octavo.models._reading import ConfigReader
from octavo.quantization.checkpoints._layer import Layer, Lowered, hollow, mxfp4
from octavo.quantization.packed import GGMLWeight

METHODS = ("mxfp4",)


class Format:
    def __init__(self, config: ConfigReader) -> None:
        """Create the format.

        config: not used.
        """

    def weights(self, layer: Layer) -> Iterator[Lowered]:
        for name in [part.removesuffix("_blocks") for part in layer.parts if part.endswith("_blocks")]:
            blocks, scales = f"{name}_blocks", f"{name}_scales"
            *rows, num_blocks = shape = layer.shape(scales, "U8", "F8_E8M0")
            layer.check(blocks, (*shape, 16), "U8")
            like = GGMLWeight("MXFP4", hollow(*rows, num_blocks * 17))
            yield layer.lower(like, partial(mxfp4, layer, blocks, scales, shape), f"{name}.weight", (blocks, scales))
