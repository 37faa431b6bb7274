"""LLM.int8, NF4 and FP4 of bitsandbytes. The tensors are self-contained; nothing is read from the configuration.

In LLM.int8, a number is code * scale / 127, with a scale for each row. The outliers of LLM.int8 are in activations, not
in weights.

In NF4 and FP4, a number is scale * table[code], with a scale for each block of the flattened matrix. With double
quantization the scales are codes too: nested scale * nested table[code] + offset.

Source: `QuantState` of bitsandbytes, https://github.com/bitsandbytes-foundation/bitsandbytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.models._reading import MAX_WIDTH, ConfigReader
from octavo.quantization.at_load import BLOCK as AT_LOAD_BLOCK
from octavo.quantization.at_load import FP4, NF4
from octavo.quantization.checkpoints._layer import Layer, Lowered, choice, hollow
from octavo.quantization.checkpoints._stored import StoredTensor, stored_tensor
from octavo.quantization.packed import CodebookWeight, GroupedWeight, Weight

METHODS = ("bitsandbytes",)

_NESTED_BLOCK = 256
_STATE = "weight.quant_state.bitsandbytes__"
_MAX_STATE_BYTES = 1 << 12
_TABLES = {"NF4": NF4, "FP4": FP4}
_OWN_TABLE = "CUSTOM4"  # no kernel has this name, so sizes and notes count float16


class Format:
    def __init__(self, config: ConfigReader) -> None:
        """Create the format.

        config: not used.
        """

    def weights(self, layer: Layer) -> Iterator[Lowered]:
        if "SCB" in layer.parts:
            yield _int8(layer)
        for part in layer.parts:
            if part.startswith(_STATE):
                yield _four_bits(layer, _state(layer, part))


def _int8(layer: Layer) -> Lowered:
    out, width = layer.matrix("weight", "I8")
    layer.check("SCB", (out,), "F32")
    if "weight_format" in layer.parts and layer.bytes("weight_format").any():
        raise layer.error("weight_format", "is not 0: only the plain order of rows is supported")

    def make() -> Weight:
        scales = layer.array("SCB")[:, None] / np.float32(127)
        return GroupedWeight(8, None, layer.array("weight").view(np.uint8) ^ np.uint8(128), scales, 128)

    return layer.lower(GroupedWeight(8, None, hollow(out, width), hollow(out, 1, dtype="f4"), 128), make)


def _state(layer: Layer, part: str) -> ConfigReader:
    """Return the JSON object that describes a matrix."""
    stored = layer.bytes(part)
    try:
        if stored.nbytes > _MAX_STATE_BYTES or not isinstance(state := json.loads(stored.tobytes()), dict):
            raise ValueError(f"it must be an object of at most {_MAX_STATE_BYTES} bytes")
    except (ValueError, RecursionError) as error:
        raise layer.error(part, f"is not a quantization state: {error}") from error
    name = layer.parts[part]
    return ConfigReader({f"{name}: {key}": value for key, value in state.items()}, f"{name}: ")


def _four_bits(layer: Layer, state: ConfigReader) -> Lowered:
    name = choice(state, "quant_type", ("nf4", "fp4")).upper()
    sizes = state.values.get(f"{state.prefix}shape")
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(n) is int and 0 < n <= MAX_WIDTH for n in sizes):
        raise state.error("shape", sizes, f"must be two whole numbers from 1 to {MAX_WIDTH}")
    out, width = sizes
    if width % 2 or layer.bytes("weight").nbytes * 2 != out * width:
        raise state.error("shape", sizes, f"needs an even width and {out * width / 2} bytes of `weight`")
    block = state.integer("blocksize", high=1 << 16)
    # A block may continue in the next row, so each row is cut into pieces within one block.
    piece = gcd(block, width)
    layer.check("weight.quant_map", (16,), "F32")
    table = tuple(layer.array("weight.quant_map").tolist())
    if not np.allclose(table, _TABLES[name], rtol=0, atol=1e-3):
        name = _OWN_TABLE
    num_blocks = -(-out * width // block)
    is_nested = "weight.nested_absmax" in layer.parts
    layer.check("weight.absmax", (num_blocks,), "U8" if is_nested else "F32")
    if is_nested:
        nested, offset = (
            state.integer("nested_blocksize", high=1 << 16),
            np.float32(state.number("nested_offset", low=-1e6)),
        )
        layer.check("weight.nested_absmax", (-(-num_blocks // nested),), "F32")
        layer.check("weight.nested_quant_map", (256,), "F32")

    def scales() -> NDArray[np.float32]:
        found: NDArray[Any] = layer.array("weight.absmax")
        if is_nested:
            each = np.repeat(layer.array("weight.nested_absmax"), nested)[:num_blocks]
            found = layer.array("weight.nested_quant_map")[found] * each + offset
        return np.repeat(found, block // piece)[: out * width // piece].reshape(out, -1)

    def make() -> Weight:
        pairs = layer.bytes("weight").reshape(out, -1)
        swapped: NDArray[Any] = pairs << 4 | pairs >> 4  # stored with the first column in the high four bits
        return CodebookWeight(name, table, piece, swapped, scales())

    empty = hollow(out, width // 2), hollow(out, width // piece, dtype="f4")
    return layer.lower(CodebookWeight(name, table, piece, *empty), make)


def tensors(weight: CodebookWeight | GroupedWeight, dtype: str) -> dict[str, StoredTensor]:
    """Return the stored tensors of a layer that `octavo.quantization.at_load` quantized to NF4, FP4 or int8.

    The scales of NF4 and FP4 are themselves eight-bit codes: double quantization, Dettmers et al., arXiv 2305.14314.
    dtype: type of the model, such as `bfloat16`.
    """
    if isinstance(weight, GroupedWeight):
        assert (weight.bits, weight.group, weight.zero) == (8, None, 128)
        codes = (weight.codes ^ np.uint8(128)).view(np.int8)
        scb = weight.scales[:, 0].astype(np.float32) * np.float32(127)
        return {
            "weight": stored_tensor(codes),
            "SCB": stored_tensor(scb),
            "weight_format": stored_tensor(np.zeros((), np.uint8)),
        }
    out, width = weight.shape
    # A scale of the flattened matrix applies to every piece of its block.
    scales = weight.scales.reshape(-1)[:: AT_LOAD_BLOCK // weight.block]
    nested, offset = _nested(scales.astype(np.float32))
    state = {"quant_type": weight.name.lower(), "blocksize": AT_LOAD_BLOCK, "dtype": dtype, "shape": [out, width]}
    state |= {"nested_blocksize": _NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset}
    return {
        "weight": stored_tensor((weight.codes << 4 | weight.codes >> 4).reshape(-1, 1)),
        "weight.quant_map": stored_tensor(np.array(weight.table, np.float32)),
        **nested,
        f"{_STATE}{weight.name.lower()}": stored_tensor(np.frombuffer(json.dumps(state).encode(), np.uint8)),
    }


def _nested(scales: NDArray[np.float32]) -> tuple[dict[str, StoredTensor], float]:
    """Return the tensors that store scales [blocks] as codes, and the mean of the scales.

    The mean is subtracted from the scales first, and a reader adds it as the offset.
    """
    offset = scales.mean(dtype=np.float64).astype(np.float32)
    rest = np.pad(scales - offset, (0, -len(scales) % _NESTED_BLOCK)).reshape(-1, _NESTED_BLOCK)
    largest = np.abs(rest).max(axis=1)
    table = dynamic_table()
    ratios = rest / np.where(largest > 0, largest, 1)[:, None]
    codes = np.searchsorted((table[1:] + table[:-1]) / 2, ratios).astype(np.uint8).reshape(-1)[: len(scales)]
    nested = {"absmax": codes, "nested_absmax": largest, "nested_quant_map": table}
    return {f"weight.{name}": stored_tensor(array) for name, array in nested.items()}, float(offset)


def dynamic_table() -> NDArray[np.float32]:
    """Return the numbers of bitsandbytes' eight-bit codes in ascending order (Dettmers et al., arXiv 2110.02861).

    Besides 0 and 1, they cover seven decades with either sign, each with twice as many numbers as the one below it.
    """
    found = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1, 2**decade + 1)
        middles = 10.0 ** (decade - 6) * (edges[1:] + edges[:-1]) / 2
        found += [*middles, *-middles]
    return np.array(sorted(found), np.float32)
