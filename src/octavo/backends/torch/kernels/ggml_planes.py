"""Conversion of ggml's block types to the fields of `Planes`. Every number stays exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.quantization import ggml_blocks
from octavo.quantization.ggml import BLOCK_SIZES
from octavo.quantization.ggml_blocks import CURVE, E2M1_DOUBLED, Bytes, fields, planes, view_as
from octavo.quantization.packed.float8 import e4m3_values

Fields = dict[str, Any]
"""Fields of `Planes`. Arrays are [blocks, k]; `codes` has one code per byte, and `bits` is the width of a code."""


def fields_of(type_name: str, data: Bytes) -> Fields | None:
    """Return the fields of a tensor, data [*, out, bytes per row], or None for a type of plain numbers.

    In the types IQ1 to IQ3, a code selects a vector from a grid. Here each number of that vector becomes a code of 3 or
    4 bits. This takes more memory than the file does, but the device needs no grids.
    """
    make = _FIELDS.get(type_name)
    if make is None:
        return None
    values, size = BLOCK_SIZES[type_name]
    rows = data.shape[:-1]
    found = make(data.reshape(-1, size))
    for name, value in found.items():
        if isinstance(value, np.ndarray) and name != "table":
            found[name] = value.reshape(*rows, -1)
    found["group"] = found.get("group", values)
    if "supers" in found:
        found["super_group"] = values
    return found


def _nibbles(raw: Bytes) -> Bytes:
    """Unpack 16 bytes to 32 codes: value i is the low half of byte i, value 16 + i its high half."""
    found: Bytes = planes(raw, 4).reshape(len(raw), 32)
    return found


def _five_bits(raw: Bytes) -> Bytes:
    found: Bytes = _nibbles(raw[:, 4:]) | (fields(raw[:, :4], 1) << np.uint8(4))
    return found


def _half(blocks: Bytes, at: int) -> NDArray[np.float16]:
    found: NDArray[np.float16] = view_as(blocks[:, at : at + 2], "<f2")
    return found


def _k_affine(blocks: Bytes, codes: Bytes, bits: int) -> Fields:
    """Return the fields of Q4_K or Q5_K; see `ggml_blocks`."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    return {
        "codes": codes,
        "bits": bits,
        "group": 32,
        "scales": np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1),
        "minima": np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1),
        "supers": _half(blocks, 0),
        "super_minima": -_half(blocks, 2),
    }


def _q4_k(b: Bytes) -> Fields:
    return _k_affine(b, planes(b[:, 16:].reshape(-1, 4, 32), 4).reshape(-1, 256), 4)


def _q5_k(b: Bytes) -> Fields:
    low = planes(b[:, 48:].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    return _k_affine(b, (low | (planes(b[:, 16:48], 1) << np.uint8(4))).reshape(-1, 256), 5)


def _q2_k(b: Bytes) -> Fields:
    return {
        "codes": planes(b[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 256),
        "bits": 2,
        "group": 16,
        "scales": b[:, :16] & 15,
        "minima": b[:, :16] >> 4,
        "supers": _half(b, 80),
        "super_minima": -_half(b, 82),
    }


def _q3_k(b: Bytes) -> Fields:
    low, high = planes(b[:, 96:104], 4).reshape(-1, 16), planes(b[:, 104:108], 2).reshape(-1, 16)
    codes = planes(b[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, 256) | (planes(b[:, :32], 1).reshape(-1, 256) << 2)
    scales = (low | (high << 4)).astype(np.int8) - np.int8(32)
    return {"codes": codes, "bits": 3, "zero": 4, "group": 16, "scales": scales, "supers": _half(b, 108)}


def _q6_k(b: Bytes) -> Fields:
    low = planes(b[:, :128].reshape(-1, 2, 64), 4).reshape(-1, 256)
    high = planes(b[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, 256)
    scales = b[:, 192:208].view(np.int8)
    return {
        "codes": low | (high << 4),
        "bits": 6,
        "zero": 32,
        "group": 16,
        "scales": np.ascontiguousarray(scales),
        "supers": _half(b, 208),
    }


def _ternary(values: NDArray[np.float32], scales: NDArray[np.float16]) -> Fields:
    """Return the fields of a ternary type.

    values: -1, 0 and 1.
    """
    return {"codes": (values + 1).astype(np.uint8), "bits": 2, "zero": 1, "scales": scales}


def _with_unit_scale(blocks: Bytes, at: int) -> Bytes:
    """Copy the blocks, with 1 as the float16 scale at byte `at`."""
    found: Bytes = blocks.copy()
    found[:, at : at + 2] = np.array([1], "<f2").view(np.uint8)
    return found


def _mxfp4(b: Bytes) -> Fields:
    table = E2M1_DOUBLED
    return {"codes": _nibbles(b[:, 1:]), "bits": 4, "scales": b[:, :1], "scale_bits": "e8m0", "table": table}


def _nvfp4(b: Bytes) -> Fields:
    found = {"codes": planes(b[:, 4:].reshape(-1, 4, 8), 4).reshape(-1, 64), "bits": 4, "group": 16}
    found["table"] = E2M1_DOUBLED / 2
    scales = np.where(b[:, :4] == 0x7F, np.uint8(0), b[:, :4] & np.uint8(0x7F))
    if (scales == 0x7F).any():  # ggml reads byte 0xFF as 480, which E4M3 cannot represent and no quantizer writes
        values = np.where(scales == 0x7F, np.float32(480), e4m3_values(scales))
        return found | {"scales": values.astype(np.float16)}
    return found | {"scales": scales, "scale_bits": "e4m3"}


def _from_points(
    parts: Callable[[Bytes], ggml_blocks.Parts], numbers: tuple[float, ...], share: float
) -> Callable[[Bytes], Fields]:
    """Return the converter of a type whose numbers come from a small set.

    A block has one factor, and the scale of each of its groups is a share of this factor.

    share: the unit in which these shares are stored.
    """
    table = np.array(sorted(numbers), np.float32)

    def make(b: Bytes) -> Fields:
        whole, shares, points = parts(b)
        return {
            "codes": np.searchsorted(table, points.reshape(len(b), -1)).astype(np.uint8),
            "bits": 3 if len(table) <= 8 else 4,
            "group": 256 // shares.shape[1],
            "scales": (shares / np.float32(share)).astype(np.int8),
            "supers": whole * np.float32(share),
            "table": table,
        }

    return make


def _signed(*magnitudes: float) -> tuple[float, ...]:
    return (*magnitudes, *(-m for m in magnitudes))


_IQ2 = _signed(8, 25, 43)
_IQ3_XXS = _signed(4, 12, 20, 28, 36, 44, 52, 62)
_IQ3_S = _signed(*range(1, 16, 2))
_IQ1 = _signed(0.125, 0.875, 1.125)

_FIELDS: dict[str, Callable[[Bytes], Fields]] = {
    "Q4_0": lambda b: {"codes": _nibbles(b[:, 2:]), "bits": 4, "zero": 8, "scales": _half(b, 0)},
    "Q4_1": lambda b: {"codes": _nibbles(b[:, 4:]), "bits": 4, "scales": _half(b, 0), "minima": _half(b, 2)},
    "Q5_0": lambda b: {"codes": _five_bits(b[:, 2:]), "bits": 5, "zero": 16, "scales": _half(b, 0)},
    "Q5_1": lambda b: {"codes": _five_bits(b[:, 4:]), "bits": 5, "scales": _half(b, 0), "minima": _half(b, 2)},
    "Q8_0": lambda b: {"codes": b[:, 2:] ^ np.uint8(128), "bits": 8, "zero": 128, "scales": _half(b, 0)},
    "Q8_1": lambda b: {"codes": b[:, 4:] ^ np.uint8(128), "bits": 8, "zero": 128, "scales": _half(b, 0)},
    "Q8_K": lambda b: {
        "codes": b[:, 4:260] ^ np.uint8(128),
        "bits": 8,
        "zero": 128,
        "scales": view_as(b[:, :4], "<f4"),
    },
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "TQ1_0": lambda b: _ternary(ggml_blocks.tq1_0(_with_unit_scale(b, 52)), _half(b, 52)),
    "TQ2_0": lambda b: _ternary(ggml_blocks.tq2_0(_with_unit_scale(b, 64)), _half(b, 64)),
    "Q1_0": lambda b: {
        "codes": fields(b[:, 2:], 1),
        "bits": 1,
        "scales": _half(b, 0),
        "table": np.array([-1, 1], np.float32),
    },
    "Q2_0": lambda b: {"codes": fields(b[:, 2:], 2), "bits": 2, "zero": 1, "scales": _half(b, 0)},
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "IQ4_NL": lambda b: {"codes": _nibbles(b[:, 2:]), "bits": 4, "scales": _half(b, 0), "table": CURVE},
    "IQ4_XS": _from_points(ggml_blocks.iq4_xs, tuple(CURVE), 1.0),
    "IQ2_XXS": _from_points(ggml_blocks.iq2_xxs, _IQ2, 0.125),
    "IQ2_XS": _from_points(ggml_blocks.iq2_xs, _IQ2, 0.125),
    "IQ2_S": _from_points(ggml_blocks.iq2_s, _IQ2, 0.125),
    "IQ3_XXS": _from_points(ggml_blocks.iq3_xxs, _IQ3_XXS, 0.25),
    "IQ3_S": _from_points(ggml_blocks.iq3_s, _IQ3_S, 1.0),
    "IQ1_S": _from_points(ggml_blocks.iq1_s, _IQ1, 1.0),
    "IQ1_M": _from_points(ggml_blocks.iq1_m, _IQ1, 1.0),
}
