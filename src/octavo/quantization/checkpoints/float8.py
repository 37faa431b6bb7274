"""FP8 of transformers and of FBGEMM: data * scale, with a scale for the tensor, each row or each block.

`activation_scheme` specifies whether the inputs of matrix products are rounded as well; with FBGEMM they always are.
Stored scales of inputs (`input_scale`) are not used.
"""

from __future__ import annotations

from collections.abc import Iterator

from octavo.models._reading import ConfigReader
from octavo.quantization.checkpoints._layer import Layer, Lowered, block_shape, choice, float8

METHODS = ("fp8", "fbgemm_fp8")


class Format:
    def __init__(self, config: ConfigReader) -> None:
        self._block = block_shape(config, "weight_block_size") or (128, 128)
        scheme = choice(config, "activation_scheme", ("dynamic", "static", "none"), "none")
        self._rounds_inputs = scheme != "none" or config.text("quant_method") == "fbgemm_fp8"

    def weights(self, layer: Layer) -> Iterator[Lowered]:
        for part in ("weight_scale_inv", "weight_scale"):
            if part in layer.parts:
                yield float8(layer, part, self._block, rounds_inputs=self._rounds_inputs)
