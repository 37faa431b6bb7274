"""The formats of `--quantization`, each computed by its published formula: the numbers of a quantized matrix."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float32]

NF4 = np.array(
    [
        "-1",
        "-0.6961928",
        "-0.52507305",
        "-0.39491749",
        "-0.28444138",
        "-0.18477343",
        "-0.09105004",
        "0",
        "0.0795803",
        "0.1609302",
        "0.2461123",
        "0.33791524",
        "0.44070983",
        "0.562617",
        "0.72295684",
        "1",
    ],
    np.float32,
)
FP4 = np.array([s * n / 12 for s in (1, -1) for n in (0, 0.0625, 2, 3, 4, 6, 8, 12)], np.float32)


def nearest_of(table: Floats, w: Floats) -> Floats:
    """Quantize blocks of 64 over the flattened matrix, scaled by absmax, each number to the nearest table entry."""
    flat = np.concatenate([w.reshape(-1), np.zeros(-w.size % 64, np.float32)]).reshape(-1, 64).astype(np.float64)
    absmax = np.abs(flat).max(1, keepdims=True)
    scaled = flat / np.where(absmax == 0, 1, absmax)
    entry = np.abs(scaled[..., None] - table.astype(np.float64)).argmin(-1)
    return (table[entry] * absmax).reshape(-1)[: w.size].reshape(w.shape).astype(np.float32)


def int8_of(w: Floats) -> Floats:
    scale = np.abs(w.astype(np.float64)).max(1, keepdims=True) / 127
    return (np.rint(w / np.where(scale == 0, 1, scale)) * scale).astype(np.float32)


def int4_of(w: Floats) -> Floats:
    """Quantize groups of 64 columns, or of the largest power of two that divides the width."""
    width = w.shape[1]
    parts = w.reshape(len(w), -1, 64 if width % 64 == 0 else width & -width).astype(np.float64)
    low, high = parts.min(-1, keepdims=True).clip(max=0), parts.max(-1, keepdims=True).clip(min=0)
    scale = ((high - low).astype(np.float32) / np.float32(15)).astype(np.float16).astype(np.float64)
    scale = np.where(scale == 0, 1, scale)
    zero = np.rint(-low / scale).clip(0, 15)
    return ((np.rint(parts / scale + zero).clip(0, 15) - zero) * scale).reshape(w.shape).astype(np.float32)


def fp8_of(w: Floats) -> Floats:
    scale = np.abs(w).max(1, keepdims=True) / np.float32(448)
    scale = np.where(scale == 0, np.float32(1), scale)
    return torch.from_numpy(w / scale).to(torch.float8_e4m3fn).float().numpy() * scale


FORMULAS: dict[str, Callable[[Floats], Floats]] = {
    "nf4": lambda w: nearest_of(NF4, w),
    "fp4": lambda w: nearest_of(FP4, w),
    "int8": int8_of,
    "int4": int4_of,
    "fp8": fp8_of,
}
