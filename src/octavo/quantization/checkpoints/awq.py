"""AWQ in the layout of AutoAWQ's matrix product (`gemm`): eight rows of codes per word, in a special order.

A number is scale * (code - zero). Source: `WQLinear_GEMM` of AutoAWQ, https://github.com/casper-hansen/AutoAWQ.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from octavo.models._reading import ConfigReader
from octavo.quantization.checkpoints._layer import FLOATS, Layer, Lowered, choice, group_size, hollow
from octavo.quantization.checkpoints._stored import StoredTensor, stored_tensor, words
from octavo.quantization.packed import GroupedWeight, Weight
from octavo.quantization.packed.grouped import packed, unpacked

METHODS = ("awq",)

_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # places of the codes of rows 0 to 7 in a word, from the lowest bits up


class Format:
    def __init__(self, config: ConfigReader) -> None:
        self._config = config
        choice(config, "w_bit" if config.has("w_bit") else "bits", (4,))
        choice(config, "zero_point", (True,), True)
        choice(config, "version", ("gemm", "GEMM"), "gemm")

    def weights(self, layer: Layer) -> Iterator[Lowered]:
        if "qweight" not in layer.parts:
            return
        width, num_words = layer.matrix("qweight", "I32")
        out = num_words * 8
        key = "q_group_size" if self._config.has("q_group_size") else "group_size"
        group = group_size(self._config, key, width)
        groups = width // (group or width)
        layer.check("scales", (groups, out), *FLOATS)
        layer.check("qzeros", (groups, num_words), "I32")

        def make() -> Weight:
            codes, zeros = (_rows(layer.array(part)) for part in ("qweight", "qzeros"))
            scales = np.ascontiguousarray(layer.array("scales").T)
            return GroupedWeight(4, group, packed(codes, 4), scales, zeros=zeros)

        scales = layer.scales_like("scales", out, groups)
        yield layer.lower(GroupedWeight(4, group, hollow(out, width // 2), scales, zeros=hollow(out, groups)), make)


def _rows(words: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Return the codes of words [n, out / 8], one per byte: [out, n]."""
    codes = unpacked(words.view(np.uint8), 4).reshape(len(words), -1, 8)[..., _PLACES]
    return np.ascontiguousarray(codes.reshape(len(words), -1).T)


def tensors(weight: GroupedWeight) -> dict[str, StoredTensor]:
    """Return the stored tensors of a layer with 4 bits and zeros. Raises ValueError unless rows fill whole words."""
    assert weight.bits == 4
    assert weight.zeros is not None
    assert weight.column_order is None
    return {
        "qweight": stored_tensor(_words(unpacked(weight.codes, 4))),
        "qzeros": stored_tensor(_words(weight.zeros)),
        "scales": stored_tensor(weight.scales.T),
    }


def _words(rows: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Pack rows of codes, one per byte, into words: [out, n] -> [n, out / 8]. The inverse of `_rows`."""
    if len(rows) % 8:
        raise ValueError(f"{len(rows)} rows are not a multiple of 8")
    codes = np.ascontiguousarray(rows.T)
    placed = np.empty((len(codes), len(rows) // 8, 8), np.uint8)
    placed[..., _PLACES] = codes.reshape(placed.shape)
    return words(placed.reshape(codes.shape), 4)
