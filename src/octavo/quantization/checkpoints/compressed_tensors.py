"""Checkpoints of llm-compressor: packed or plain integers, FP8, NVFP4 and MXFP4.

The configuration has groups of layers with different formats. A number is scale * (code - zero). Codes and zeros are
signed; in packed tensors, half of their range is added. `input_activations` of a group specifies whether its inputs are
rounded as well. Stored input scales are not used, because the backend computes finer ones.
Source: compressed-tensors, https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelLoadError
from octavo.models._reading import ConfigReader
from octavo.quantization.checkpoints._layer import (
    FLOATS,
    Layer,
    Lowered,
    block_shape,
    choice,
    column_order,
    float8,
    group_size,
    hollow,
    matches,
    mxfp4,
)
from octavo.quantization.checkpoints._stored import StoredTensor, stored_tensor
from octavo.quantization.packed import CodebookWeight, Float8Weight, GGMLWeight, GroupedWeight, Weight
from octavo.quantization.packed.grouped import packed, unpacked

METHODS = ("compressed-tensors",)

_FORMATS = tuple(f"{kind}-quantized" for kind in ("pack", "int", "float", "naive", "nvfp4-pack", "mxfp4-pack"))
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Format:
    def __init__(self, config: ConfigReader) -> None:
        self._format = choice(config, "format", (*_FORMATS, "mixed-precision"))
        choice(config.section("sparsity_config"), "format", ("dense",), "dense")
        for key, value in config.section("transform_config").values.items():
            raise ModelLoadError(f"{key} is {value!r:.100}: transforms of activations are not supported")
        groups = config.section("config_groups")
        self._groups = [groups.section(key.removeprefix(groups.prefix)) for key in groups.values]

    def weights(self, layer: Layer) -> Iterator[Lowered]:
        if "weight_scale" not in layer.parts:
            return
        group = self._group(layer.name)
        choice(group, "format", _FORMATS, self._format)
        weights = group.section("weights")
        stored = layer.type_name("weight_packed" if "weight_packed" in layer.parts else "weight")
        if stored.startswith("F8"):
            block = block_shape(weights, "block_structure")
            yield float8(layer, "weight_scale", block, rounds_inputs=_has_inputs_of(group, "float"))
        else:
            yield _four_bit_floats(layer) if stored == "U8" else _integers(layer, group, weights)

    def _group(self, name: str) -> ConfigReader:
        """Return the configuration group of a layer. Raises ModelLoadError if there is none.

        A target that is a name or a pattern of names takes precedence over a target that is a class. The class is
        always `Linear`.
        """
        of_class: ConfigReader | None = None
        for group in self._groups:
            targets = group.values.get(f"{group.prefix}targets")
            if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
                raise group.error("targets", targets, "must be a list of strings")
            for target in targets:
                pattern = target.removeprefix("re:")
                if target == name or (pattern != target and matches(group, "targets", pattern, name)):
                    return group
                if target == "Linear" and of_class is None:
                    of_class = group
        if of_class is None:
            raise ModelLoadError(f"layer {name!r:.80} is quantized, but no target in config_groups matches it")
        return of_class


def _has_inputs_of(group: ConfigReader, kind: str) -> bool:
    """Return True if the inputs of these layers are rounded to eight bits of this kind, `int` or `float`."""
    inputs = group.section("input_activations") if group.has("input_activations") else None
    return inputs is not None and inputs.integer("num_bits") == 8 and inputs.text("type", "int") == kind


def _integers(layer: Layer, section: ConfigReader, config: ConfigReader) -> Lowered:
    bits, half = (n := config.integer("num_bits", low=2, high=8)), 1 << n - 1
    is_packed, has_zeros = ("weight_packed" in layer.parts), ("weight_zero_point" in layer.parts)
    if is_packed:
        layer.check("weight_shape", (2,), "I64", "I32")
        out, width = (int(size) for size in layer.array("weight_shape"))
        layer.check("weight_packed", (out, -(-width * bits // 32)), "I32")
    else:
        out, width = layer.matrix("weight", "I8")
    by_group = choice(config, "strategy", ("group", "channel", "tensor")) == "group"
    group = group_size(config, "group_size", width) if by_group else None
    groups = width // (group or width)
    if (found := layer.shape("weight_scale", *FLOATS)) not in ((out, groups), (1,)):
        raise layer.error("weight_scale", f"has the shape {list(found)}; it must be [{out}, {groups}] or [1]")
    if has_zeros and layer.type_name("weight_zero_point") == "I32":
        layer.check("weight_zero_point", (-(-out * bits // 32), groups), "I32")
    elif has_zeros:
        layer.check("weight_zero_point", found, "I8")
    order = column_order(layer, "weight_g_idx", width, group)
    inputs: Literal["int8"] | None = "int8" if bits == 8 and _has_inputs_of(section, "int") else None

    def codes() -> NDArray[np.uint8]:
        if not is_packed:
            plain = layer.array("weight").view(np.uint8) + np.uint8(half)
            return packed(plain if order is None else plain[:, order], bits)
        stored = layer.array("weight_packed").view(np.uint8)[:, : -(-width * bits // 8)]
        return stored if order is None else packed(unpacked(stored, bits)[:, order], bits)

    def zeros() -> NDArray[np.uint8]:
        stored = layer.array("weight_zero_point")
        if stored.dtype == np.int32:  # packed along the rows
            return np.ascontiguousarray(unpacked(np.ascontiguousarray(stored.T).view(np.uint8), bits)[:, :out].T)
        return np.broadcast_to(stored.view(np.uint8) + np.uint8(half), (out, groups))

    def make() -> Weight:
        scales = np.broadcast_to(layer.array("weight_scale"), (out, groups))
        found = zeros() if has_zeros else None
        return GroupedWeight(bits, group, codes(), scales, half, found, column_order=order, inputs=inputs)

    empty, scales = hollow(out, -(-width * bits // 8)), layer.scales_like("weight_scale", out, groups)
    no_zeros = hollow(out, groups) if has_zeros else None
    like = GroupedWeight(bits, group, empty, scales, half, no_zeros, column_order=order, inputs=inputs)
    return layer.lower(like, make)


def _four_bit_floats(layer: Layer) -> Lowered:
    shape = layer.matrix("weight_scale", "F8_E4M3", "U8", "F8_E8M0")
    rows, num_blocks = shape
    if layer.type_name("weight_scale") != "F8_E4M3":
        layer.check("weight_packed", (rows, num_blocks * 16), "U8")
        like = GGMLWeight("MXFP4", hollow(rows, num_blocks * 17))
        return layer.lower(like, partial(mxfp4, layer, "weight_packed", "weight_scale", shape))
    layer.check("weight_packed", (rows, num_blocks * 8), "U8")
    layer.check("weight_global_scale", (1,), "F32")

    def weight(codes: NDArray[Any], scales: NDArray[Any], row_scales: NDArray[Any]) -> Weight:
        return CodebookWeight("NVFP4", _E2M1, 16, codes, scales, row_scales)

    def make() -> Weight:
        row_scales = np.full((rows, 1), np.float32(1) / layer.array("weight_global_scale"), np.float32)
        return weight(layer.array("weight_packed"), layer.array("weight_scale"), row_scales)

    return layer.lower(weight(hollow(rows, num_blocks * 8), hollow(*shape), hollow(rows, 1, dtype="f4")), make)


def tensors(weight: Float8Weight | GroupedWeight | GGMLWeight) -> dict[str, StoredTensor]:
    """Return the stored tensors of a layer: E4M3 or int8 with a scale for each row, or MXFP4."""
    if isinstance(weight, Float8Weight):
        assert (weight.block_rows, weight.block_columns) == (1, None)
        return {"weight": stored_tensor(weight.data, "F8_E4M3"), "weight_scale": stored_tensor(weight.scales)}
    if isinstance(weight, GroupedWeight):
        assert (weight.bits, weight.group, weight.zero) == (8, None, 128)
        codes = (weight.codes ^ np.uint8(128)).view(np.int8)
        return {"weight": stored_tensor(codes), "weight_scale": stored_tensor(weight.scales.astype(np.float32))}
    assert weight.type_name == "MXFP4"
    rows = weight.shape[0]
    blocks = weight.data.reshape(rows, -1, 17)
    pairs = blocks[..., 1:]
    columns = np.concatenate([pairs & 15, pairs >> 4], -1)
    codes = columns[..., ::2] | columns[..., 1::2] << 4
    return {"weight_packed": stored_tensor(codes.reshape(rows, -1)), "weight_scale": stored_tensor(blocks[..., 0])}
