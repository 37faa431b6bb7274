"""GPTQ: codes packed along the columns, by AutoGPTQ and GPTQModel.

A number is scale * (code - zero). In version 1 of the format, zeros are stored less one, modulo the number of codes.
Column i has the scale of group g_idx[i]. Source: `QuantLinear` of AutoGPTQ, https://github.com/AutoGPTQ/AutoGPTQ.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from octavo.models._reading import ConfigReader
from octavo.quantization.checkpoints._layer import (
    FLOATS,
    Layer,
    Lowered,
    choice,
    column_order,
    group_size,
    hollow,
    matches,
)
from octavo.quantization.checkpoints._stored import StoredTensor, stored_tensor, words
from octavo.quantization.packed import GroupedWeight, Weight
from octavo.quantization.packed.grouped import packed, unpacked

METHODS = ("gptq",)

_BITS = (2, 3, 4, 8)


class Format:
    def __init__(self, config: ConfigReader) -> None:
        self._config = config
        key = "checkpoint_format" if config.has("checkpoint_format") else "format"
        self._zero_offset = int(choice(config, key, ("gptq", "gptq_v2"), "gptq") == "gptq")
        choice(config, "bits", _BITS)

    def _of(self, name: str) -> ConfigReader:
        """Return the configuration of a layer. GPTQModel has separate keys for layers that match a pattern."""
        dynamic = self._config.section("dynamic")
        for key in dynamic.values:
            pattern = key.removeprefix(dynamic.prefix)
            # A layer that `-:` takes out has a plain weight.
            if not pattern.startswith("-:") and matches(dynamic, pattern, pattern.removeprefix("+:"), name):
                own, prefix = dynamic.section(pattern), self._config.prefix
                keys = {prefix + key.removeprefix(own.prefix): value for key, value in own.values.items()}
                return ConfigReader({**self._config.values, **keys}, prefix)
        return self._config

    def weights(self, layer: Layer) -> Iterator[Lowered]:
        if "qweight" not in layer.parts:
            return
        num_words, out = layer.matrix("qweight", "I32")
        config = self._of(layer.name)
        bits, is_symmetric = choice(config, "bits", _BITS), config.flag("sym", True)
        width = num_words * 32 // bits
        group = group_size(config, "group_size", width)
        groups, zero = width // (group or width), 1 << bits - 1
        layer.check("scales", (groups, out), *FLOATS)
        layer.check("qzeros", (groups, -(-out * bits // 32)), "I32")
        order = column_order(layer, "g_idx", width, group)

        def make() -> Weight:
            codes = np.ascontiguousarray(layer.array("qweight").T).view(np.uint8)
            if order is not None:
                codes = packed(unpacked(codes, bits)[:, order], bits)
            stored = unpacked(layer.array("qzeros").view(np.uint8), bits)[:, :out].T
            zeros = (stored + np.uint8(self._zero_offset)) & np.uint8((1 << bits) - 1)
            # The zeros of symmetric codes are known, and some files name the wrong version.
            if is_symmetric and not any((stored == known).all() for known in (zero - 1, zero)):
                raise layer.error(
                    "qzeros",
                    f"has zeros other than those of symmetric codes, {zero - 1} in version 1 of the format and {zero} "
                    "in version 2; if they are meant, set sym to false and checkpoint_format to gptq or gptq_v2",
                )
            scales = np.ascontiguousarray(layer.array("scales").T)
            kept = None if is_symmetric else np.ascontiguousarray(zeros)
            return GroupedWeight(bits, group, codes, scales, zero, kept, column_order=order)

        codes, scales = hollow(out, width * bits // 8), layer.scales_like("scales", out, groups)
        zeros = None if is_symmetric else hollow(out, groups)
        yield layer.lower(GroupedWeight(bits, group, codes, scales, zero, zeros, column_order=order), make)


def tensors(weight: GroupedWeight) -> dict[str, StoredTensor]:
    """Return the stored tensors of a layer in version 1 of the format, because every reader supports it.

    Raises ValueError for sizes that do not fill whole words.
    """
    rows, width = weight.shape
    codes, bits = unpacked(weight.codes, weight.bits), weight.bits
    groups = (np.arange(width) // (weight.group or width)).astype(np.int32)
    if weight.column_order is not None:
        in_place, group_of = np.empty_like(codes), np.empty_like(groups)
        in_place[:, weight.column_order], group_of[weight.column_order] = codes, groups
        codes, groups = in_place, group_of
    zeros = np.full((rows, weight.scales.shape[1]), weight.zero, np.uint8) if weight.zeros is None else weight.zeros
    less_one = (zeros - np.uint8(1)) & np.uint8((1 << bits) - 1)
    return {
        "qweight": stored_tensor(words(codes, bits).T),
        "qzeros": stored_tensor(words(np.ascontiguousarray(less_one.T), bits)),
        "scales": stored_tensor(weight.scales.T),
        "g_idx": stored_tensor(groups),
    }
