"""The number types of ggml: their ids in files, their block sizes and their dequantization.

Source: the type table of ggml (`ggml.h`, `ggml-common.h`) and the GGUF specification.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from octavo.quantization import ggml_blocks
from octavo.quantization.ggml_blocks import codes, five_bits, floats, half, nibbles, product_of

BlockDecoder = Callable[[NDArray[np.uint8]], NDArray[np.float32]]
"""Converts raw blocks [n, bytes per block] to values [n, values per block]."""

# Name, id in a GGUF file, values and bytes of a block, decoder. Ids 4, 5 (Q4_2, Q4_3), 31 to 33 (Q4_0 interleaved by 4
# and 8) and 36 to 38 (IQ4_NL interleaved) were removed from the format, and no reader accepts them any more.
_TYPES: tuple[tuple[str, int, int, int, BlockDecoder], ...] = (
    ("F32", 0, 1, 4, lambda b: floats(b, "<f4")),
    ("F16", 1, 1, 2, lambda b: floats(b, "<f2")),
    ("Q4_0", 2, 32, 18, lambda b: half(b, 0) * (nibbles(b[:, 2:]) - 8)),
    ("Q4_1", 3, 32, 20, lambda b: half(b, 0) * nibbles(b[:, 4:]) + half(b, 2)),
    ("Q5_0", 6, 32, 22, lambda b: half(b, 0) * (five_bits(b[:, 2:]) - 16)),
    ("Q5_1", 7, 32, 24, lambda b: half(b, 0) * five_bits(b[:, 4:]) + half(b, 2)),
    ("Q8_0", 8, 32, 34, lambda b: half(b, 0) * floats(b[:, 2:], "i1")),
    ("Q8_1", 9, 32, 36, lambda b: half(b, 0) * floats(b[:, 4:], "i1")),  # with the sum of the block
    ("Q2_K", 10, 256, 84, ggml_blocks.q2_k),
    ("Q3_K", 11, 256, 110, ggml_blocks.q3_k),
    ("Q4_K", 12, 256, 144, ggml_blocks.q4_k),
    ("Q5_K", 13, 256, 176, ggml_blocks.q5_k),
    ("Q6_K", 14, 256, 210, ggml_blocks.q6_k),
    ("Q8_K", 15, 256, 292, lambda b: floats(b[:, :4], "<f4") * floats(b[:, 4:260], "i1")),  # with sums of 16 codes
    ("IQ2_XXS", 16, 256, 66, product_of(ggml_blocks.iq2_xxs)),
    ("IQ2_XS", 17, 256, 74, product_of(ggml_blocks.iq2_xs)),
    ("IQ3_XXS", 18, 256, 98, product_of(ggml_blocks.iq3_xxs)),
    ("IQ1_S", 19, 256, 50, product_of(ggml_blocks.iq1_s)),
    ("IQ4_NL", 20, 32, 18, ggml_blocks.iq4_nl),
    ("IQ3_S", 21, 256, 110, product_of(ggml_blocks.iq3_s)),
    ("IQ2_S", 22, 256, 82, product_of(ggml_blocks.iq2_s)),
    ("IQ4_XS", 23, 256, 136, product_of(ggml_blocks.iq4_xs)),
    ("I8", 24, 1, 1, lambda b: floats(b, "i1")),
    ("I16", 25, 1, 2, lambda b: floats(b, "<i2")),
    ("I32", 26, 1, 4, lambda b: floats(b, "<i4")),
    ("I64", 27, 1, 8, lambda b: floats(b, "<i8")),
    ("F64", 28, 1, 8, lambda b: floats(b, "<f8")),
    ("IQ1_M", 29, 256, 56, product_of(ggml_blocks.iq1_m)),
    ("BF16", 30, 1, 2, ggml_blocks.bf16),
    ("TQ1_0", 34, 256, 54, ggml_blocks.tq1_0),
    ("TQ2_0", 35, 256, 66, ggml_blocks.tq2_0),
    ("MXFP4", 39, 32, 17, ggml_blocks.mxfp4),
    ("NVFP4", 40, 64, 36, ggml_blocks.nvfp4),
    ("Q1_0", 41, 128, 18, lambda b: half(b, 0) * (codes(b[:, 2:], 1) * 2 - 1)),
    ("Q2_0", 42, 64, 18, lambda b: half(b, 0) * (codes(b[:, 2:], 2) - 1)),
)

GGML_TYPES: Mapping[int, str] = MappingProxyType({type_id: name for name, type_id, *_ in _TYPES})
"""Type id in a GGUF file -> type name."""

BLOCK_SIZES: Mapping[str, tuple[int, int]] = MappingProxyType({name: (n, size) for name, _, n, size, _ in _TYPES})
"""Type name -> (values per block, bytes per block)."""

_DECODERS: Mapping[str, BlockDecoder] = MappingProxyType({name: decode for name, *_, decode in _TYPES})

CHUNK_VALUES = 1 << 18
"""Number of values to decode at a time, so that temporaries take only a few megabytes."""


def stored_bytes(type_name: str, shape: tuple[int, ...]) -> int:
    """Return the number of bytes that a tensor of `shape` takes in type `type_name`.

    Raises `KeyError` for an unknown type and `ValueError` if a row is not a whole number of blocks.
    """
    values, size = BLOCK_SIZES[type_name]
    row = shape[-1] if shape else 1
    if row % values:
        raise ValueError(f"a row of {row} values is not a whole number of {type_name} blocks of {values}")
    return prod(shape) // values * size


def dequantize(type_name: str, data: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return the float32 values, with shape `shape`, of the contiguous bytes of one ggml tensor.

    Raises `KeyError` for an unknown type and `ValueError` if `data` does not fit `shape`.
    """
    expected = stored_bytes(type_name, shape)
    if data.size != expected:
        raise ValueError(f"{type_name} of shape {shape} takes {expected} bytes, got {data.size}")
    decode = _DECODERS[type_name]
    values, size = BLOCK_SIZES[type_name]
    blocks = data.reshape(-1, size)
    out = np.empty((len(blocks), values), dtype=np.float32)
    step = max(1, CHUNK_VALUES // values)
    # A file may hold scales whose product leaves float32; they become infinities, as in ggml.
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(blocks), step):
            out[start : start + step] = decode(blocks[start : start + step])
    return out.reshape(shape)
