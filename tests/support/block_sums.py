"""A numpy definition of products with Q3_K, Q4_K, Q5_K and Q6_K on all levels except AMX, bit for bit.

Super-blocks are summed as integers: csrc/kernels/linear_format.h has the formula.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.quantization.ggml_blocks import half, planes
from octavo.quantization.packed import GGMLWeight

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

SHIFTS = {"Q3_K": (0, 8), "Q4_K": (1, 7), "Q5_K": (2, 7), "Q6_K": (1, 5)}  # of sums, of scales
TYPES = tuple(SHIFTS)


@dataclass(frozen=True)
class Blocks:
    """Super-blocks [n] of 256 values: codes minus their zero, and one scale for each of `sums` equal parts."""

    codes: Ints  # [n, 256]
    scales: Ints  # [n, sums]
    mins: Ints  # [n, 8]
    d: Floats  # [n]
    m: Floats  # [n]

    @classmethod
    def of(cls, weight: GGMLWeight) -> Blocks:
        size = {"Q3_K": 110, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}[weight.type_name]
        return globals()[f"_{weight.type_name.lower()}"](weight.data.reshape(-1, size))


def _affine(raw: NDArray[np.uint8], codes: NDArray[np.uint8]) -> Blocks:
    first, second, third = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    mins = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    whole = [part.astype(np.int64) for part in (codes.reshape(-1, 256), scales, mins)]
    return Blocks(*whole, half(raw, 0)[:, 0], np.float32(0) - half(raw, 2)[:, 0])


def _q4_k(raw: NDArray[np.uint8]) -> Blocks:
    return _affine(raw, planes(raw[:, 16:].reshape(-1, 4, 32), 4))


def _q5_k(raw: NDArray[np.uint8]) -> Blocks:
    low = planes(raw[:, 48:].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    return _affine(raw, low | planes(raw[:, 16:48], 1) << np.uint8(4))


def _signed(codes: NDArray[np.uint8], zero: int, scales: Ints, d: Floats) -> Blocks:
    none = np.zeros((len(d), 8), np.int64)
    return Blocks(codes.reshape(-1, 256).astype(np.int64) - zero, scales, none, d, np.zeros_like(d))


def _q3_k(raw: NDArray[np.uint8]) -> Blocks:
    low, high = planes(raw[:, 96:104], 4).reshape(-1, 16), planes(raw[:, 104:108], 2).reshape(-1, 16)
    codes = planes(raw[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, 8, 32) | planes(raw[:, :32], 1) << np.uint8(2)
    return _signed(codes, 4, (low | high << 4).astype(np.int64) - 32, half(raw, 108)[:, 0])


def _q6_k(raw: NDArray[np.uint8]) -> Blocks:
    low = planes(raw[:, :128].reshape(-1, 2, 64), 4).reshape(-1, 256)
    high = planes(raw[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, 256)
    return _signed(low | high << 4, 32, raw[:, 192:208].view(np.int8).astype(np.int64), half(raw, 208)[:, 0])


@dataclass(frozen=True)
class Activations:
    """Rows of x as int8 with one scale per 32 values: [rows, blocks, 8, 32] and [rows, blocks, 8]."""

    codes: Ints
    scales: Floats

    @classmethod
    def of(cls, x: Floats) -> Activations:
        units = x.reshape(len(x), -1, 8, 32)
        largest = np.abs(units).max(-1, keepdims=True)
        used = largest >= 1e-30
        inverse = np.where(used, np.float32(127) / np.where(used, largest, 1), 0).astype(np.float32)
        scales = np.where(used, largest / np.float32(127), 0).astype(np.float32)
        return cls(np.rint(units * inverse).astype(np.int64), scales[..., 0])


def _fma(a: Floats, b: Floats, c: Floats) -> Floats:
    return (a.astype(np.longdouble) * b + c).astype(np.float32)


def product(weight: GGMLWeight, x: Floats) -> Floats:
    """Multiply x [rows, k] by the transpose of a weight [n, k]: [rows, n]."""
    shift, scale_shift = SHIFTS[weight.type_name]
    a, n = Activations.of(x), weight.shape[0]
    all_blocks = Blocks.of(weight)
    codes = all_blocks.codes.reshape(n, -1, 256)
    y = np.zeros((len(x), n), np.float32)
    for b in range(codes.shape[1]):
        scales = all_blocks.scales.reshape(n, codes.shape[1], -1)[:, b]
        mins = all_blocks.mins.reshape(n, codes.shape[1], 8)[:, b]
        d, m = (part.reshape(n, -1)[:, b] for part in (all_blocks.d, all_blocks.m))
        sums = scales.shape[1]
        sign = np.where(np.arange(sums) % 2, -1, 1)
        largest = a.scales[:, b].max(-1)
        factor = np.where(largest > 0, np.float32(32768) / np.where(largest > 0, largest, 1), 0).astype(np.float32)
        multipliers = np.minimum(np.rint(a.scales[:, b] * factor[:, None]).astype(np.int64), 32767)  # [rows, 8]
        rows = a.codes[:, b]
        sums_of_a = (multipliers * rows.sum(-1) + 2048) >> 12
        of_sum = multipliers.repeat(sums // 8, 1)[:, None]
        f = ((sign * scales << scale_shift) * of_sum + (1 << 14)) >> 15  # [rows, n, sums]
        parts = np.einsum("rik,nik->rni", rows.reshape(len(x), sums, -1), codes[:, b].reshape(n, sums, -1))
        whole = (f * (sign * parts >> shift)).sum(-1)
        t = whole.astype(np.float32) * (d * np.float32(2.0 ** (shift - scale_shift)))
        if weight.type_name in ("Q4_K", "Q5_K"):
            t = _fma((sums_of_a @ mins.T).astype(np.float32), m * np.float32(0.125), t)
        y = _fma(t, largest[:, None], y)
    return y
