"""BitNet: matrices with the three values -1, 0 and 1 and a single scale. arXiv 2402.17764.

`weight` [out / 4, in] has the codes of four rows in each byte, with the first quarter of the rows in the lowest bits.
`weight_scale` is the scale: with `linear_class` bitlinear the values are divided by it, with autobitlinear they are
multiplied by it. Checkpoints for training (`quantization_mode` online) have plain weights. The model itself rounds them
to the nearest of the three values times the mean of the magnitudes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from octavo.models._reading import ConfigReader
from octavo.quantization.checkpoints._layer import FLOATS, Layer, Lowered, choice, hollow
from octavo.quantization.packed import GGMLWeight, GroupedWeight, Weight

METHODS = ("bitnet",)

_BLOCK, _BLOCK_BYTES = 256, 66  # TQ2_0: 64 bytes of codes and a scale
_LEAST_MEAN = 1e-5
_SHIFTS = np.array([0, 2, 4, 6], np.uint8)  # bit offsets of the codes in a byte
_PLAIN = ("embed_tokens", "lm_head")  # layers that are never rounded


class Format:
    def __init__(self, config: ConfigReader) -> None:
        self._divides = choice(config, "linear_class", ("bitlinear", "autobitlinear"), "bitlinear") == "bitlinear"
        self._online = choice(config, "quantization_mode", ("offline", "online"), "offline") == "online"
        if config.flag("use_rms_norm", False):
            raise config.error("use_rms_norm", True, "must be false: additional norms are not supported")
        kept = config.value("modules_to_not_convert")
        if self._online and isinstance(kept, list) and {str(name).rpartition(".")[2] for name in kept} - {*_PLAIN}:
            raise config.error("modules_to_not_convert", kept, "is not supported with quantization_mode online")

    def weights(self, layer: Layer) -> Iterator[Lowered]:
        if "weight_scale" in layer.parts:
            yield self._packed(layer)
        elif self._online and _is_rounded(layer):
            yield layer.lower(_hollow(*layer.matrix("weight", *FLOATS)), lambda: _rounded(layer.array("weight")))

    def _packed(self, layer: Layer) -> Lowered:
        rows, width = layer.matrix("weight", "U8")
        layer.check("weight_scale", (1,), *FLOATS)

        def make() -> Weight:
            scale = np.float32(layer.array("weight_scale")[0])
            quarters = layer.bytes("weight").reshape(1, rows, width) >> _SHIFTS[:, None, None]
            codes = (quarters & np.uint8(3)).reshape(4 * rows, width)
            return _ternary(codes, np.float32(1) / scale if self._divides else scale)

        return layer.lower(_hollow(4 * rows, width), make)


def _is_rounded(layer: Layer) -> bool:
    if "weight" not in layer.parts or layer.name.rpartition(".")[2] in _PLAIN:
        return False
    return len(layer.shape("weight", *FLOATS)) == 2


def _rounded(weight: NDArray[np.floating]) -> Weight:
    weight = weight.astype(np.float32)
    scale = np.float32(1) / max(np.float32(np.abs(weight).mean(dtype=np.float64)), np.float32(_LEAST_MEAN))
    codes = np.clip(np.rint(weight * scale), -1, 1).astype(np.int8) + 1
    return _ternary(codes.astype(np.uint8), np.float32(1) / scale)


def _hollow(rows: int, width: int) -> Weight:
    if width % _BLOCK == 0:
        return GGMLWeight("TQ2_0", hollow(rows, width // _BLOCK * _BLOCK_BYTES))
    return GroupedWeight(2, None, hollow(rows, width // 4), hollow(rows, 1, dtype="f4"), 1)


def _ternary(codes: NDArray[np.uint8], scale: np.float32) -> Weight:
    """Build a ternary weight. A width that is not a whole number of TQ2_0 blocks gets whole-row groups instead.

    codes: 0 to 2, [out, in].
    """
    rows, width = codes.shape
    if width % _BLOCK:
        pairs = np.bitwise_or.reduce(codes.reshape(rows, width // 4, 4) << _SHIFTS, axis=-1)
        return GroupedWeight(2, None, pairs, np.full((rows, 1), scale, np.float32), 1)
    quarters = codes.reshape(rows, width // _BLOCK, 2, 4, 32) << _SHIFTS[:, None]
    bytes_ = np.bitwise_or.reduce(quarters, axis=3).reshape(rows, width // _BLOCK, 64)
    scales = np.broadcast_to(np.array([scale], np.float16).view(np.uint8), (*bytes_.shape[:2], 2))
    return GGMLWeight("TQ2_0", np.concatenate([bytes_, scales], axis=-1).reshape(rows, -1))
