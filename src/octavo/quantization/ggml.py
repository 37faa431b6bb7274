"""The number types of ggml: their ids in files, their block sizes and their meaning.

Source: the type table of ggml (`ggml.h`, `ggml-common.h`) and the GGUF specification.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from octavo.quantization import ggml_iq, ggml_k, ggml_simple, ggml_small_floats

BlockDecoder = Callable[[NDArray[np.uint8]], NDArray[np.float32]]
"""Turns raw blocks [n, bytes per block] into values [n, values per block]."""

# Ids 4, 5 (Q4_2, Q4_3), 31 to 33 (Q4_0 interleaved by 4 and 8) and 36 to 38 (IQ4_NL
# interleaved) were removed from the format, and no reader accepts them any more.
GGML_TYPES: Mapping[int, str] = MappingProxyType(
    {
        0: "F32",
        1: "F16",
        2: "Q4_0",
        3: "Q4_1",
        6: "Q5_0",
        7: "Q5_1",
        8: "Q8_0",
        9: "Q8_1",
        10: "Q2_K",
        11: "Q3_K",
        12: "Q4_K",
        13: "Q5_K",
        14: "Q6_K",
        15: "Q8_K",
        16: "IQ2_XXS",
        17: "IQ2_XS",
        18: "IQ3_XXS",
        19: "IQ1_S",
        20: "IQ4_NL",
        21: "IQ3_S",
        22: "IQ2_S",
        23: "IQ4_XS",
        24: "I8",
        25: "I16",
        26: "I32",
        27: "I64",
        28: "F64",
        29: "IQ1_M",
        30: "BF16",
        34: "TQ1_0",
        35: "TQ2_0",
        39: "MXFP4",
        40: "NVFP4",
        41: "Q1_0",
        42: "Q2_0",
    }
)
"""Type id in a GGUF file -> type name."""

BLOCK_SIZES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "F32": (1, 4),
        "F16": (1, 2),
        "BF16": (1, 2),
        "F64": (1, 8),
        "I8": (1, 1),
        "I16": (1, 2),
        "I32": (1, 4),
        "I64": (1, 8),
        "Q1_0": (128, 18),
        "Q2_0": (64, 18),
        "Q4_0": (32, 18),
        "Q4_1": (32, 20),
        "Q5_0": (32, 22),
        "Q5_1": (32, 24),
        "Q8_0": (32, 34),
        "Q8_1": (32, 36),
        "Q2_K": (256, 84),
        "Q3_K": (256, 110),
        "Q4_K": (256, 144),
        "Q5_K": (256, 176),
        "Q6_K": (256, 210),
        "Q8_K": (256, 292),
        "IQ1_S": (256, 50),
        "IQ1_M": (256, 56),
        "IQ2_XXS": (256, 66),
        "IQ2_XS": (256, 74),
        "IQ2_S": (256, 82),
        "IQ3_XXS": (256, 98),
        "IQ3_S": (256, 110),
        "IQ4_NL": (32, 18),
        "IQ4_XS": (256, 136),
        "TQ1_0": (256, 54),
        "TQ2_0": (256, 66),
        "MXFP4": (32, 17),
        "NVFP4": (64, 36),
    }
)
"""Type name -> (values per block, bytes per block)."""

CHUNK_VALUES = 1 << 18
"""Values that are decoded at a time, so that the temporaries of a decoder stay within a few megabytes."""


_DECODERS: Mapping[str, BlockDecoder] = MappingProxyType(
    {
        "F32": ggml_simple.f32,
        "F16": ggml_simple.f16,
        "BF16": ggml_simple.bf16,
        "F64": ggml_simple.f64,
        "I8": ggml_simple.i8,
        "I16": ggml_simple.i16,
        "I32": ggml_simple.i32,
        "I64": ggml_simple.i64,
        "Q1_0": ggml_simple.q1_0,
        "Q2_0": ggml_simple.q2_0,
        "Q4_0": ggml_simple.q4_0,
        "Q4_1": ggml_simple.q4_1,
        "Q5_0": ggml_simple.q5_0,
        "Q5_1": ggml_simple.q5_1,
        "Q8_0": ggml_simple.q8_0,
        "Q8_1": ggml_simple.q8_1,
        "Q2_K": ggml_k.q2_k,
        "Q3_K": ggml_k.q3_k,
        "Q4_K": ggml_k.q4_k,
        "Q5_K": ggml_k.q5_k,
        "Q6_K": ggml_k.q6_k,
        "Q8_K": ggml_k.q8_k,
        "IQ1_S": ggml_iq.iq1_s,
        "IQ1_M": ggml_iq.iq1_m,
        "IQ2_XXS": ggml_iq.iq2_xxs,
        "IQ2_XS": ggml_iq.iq2_xs,
        "IQ2_S": ggml_iq.iq2_s,
        "IQ3_XXS": ggml_iq.iq3_xxs,
        "IQ3_S": ggml_iq.iq3_s,
        "IQ4_NL": ggml_iq.iq4_nl,
        "IQ4_XS": ggml_iq.iq4_xs,
        "TQ1_0": ggml_small_floats.tq1_0,
        "TQ2_0": ggml_small_floats.tq2_0,
        "MXFP4": ggml_small_floats.mxfp4,
        "NVFP4": ggml_small_floats.nvfp4,
    }
)


def stored_bytes(type_name: str, shape: tuple[int, ...]) -> int:
    """Bytes that a tensor of `shape` takes in type `type_name`.

    Raises `KeyError` for an unknown type and `ValueError` if a row is no whole number of blocks.
    """
    values, size = BLOCK_SIZES[type_name]
    row = shape[-1] if shape else 1
    if row % values:
        raise ValueError(f"a row of {row} values is no whole number of {type_name} blocks of {values}")
    return prod(shape) // values * size


def dequantize(type_name: str, data: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """The float32 values, of `shape`, of `data`: the contiguous bytes of one ggml tensor.

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
