"""Conventions of all kernels: the interpreter's switch, tiles, and arithmetic that several kernels share.

Kernels take explicit strides and compute in float32. Under Triton's interpreter (no GPU), bfloat16 arithmetic gives
wrong results without an error, so operands of products become float32 there: `LOAD_F32`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction


@triton.jit
def operand(x):
    """Return an operand of a product: in its own type, or in float32 under the interpreter."""
    if LOAD_F32:
        return x.to(tl.float32)
    else:
        return x


# Triton decides this when it defines a kernel, so TRITON_INTERPRET=1 must be set at import time.
INTERPRETED = isinstance(operand, InterpretedFunction)
LOAD_F32 = tl.constexpr(INTERPRETED)

FLOAT8_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@triton.jit
def tanh(x):
    """Return tanh of a float32 without overflow and without libdevice."""
    a = tl.exp(-2.0 * tl.abs(x))
    y = (1.0 - a) / (1.0 + a)
    return tl.where(x < 0, -y, y)


@triton.jit
def sigmoid(x):
    a = tl.exp(-tl.abs(x))
    return tl.where(x < 0, a, 1.0) / (1.0 + a)


@triton.jit
def activation(x, KIND: tl.constexpr):
    """Apply one of the functions of `octavo.graph.ops.rowwise.ACTIVATIONS`. KIND "" returns x itself."""
    if KIND == "silu":
        x = x * sigmoid(x)
    elif KIND == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        x = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif KIND == "relu":
        x = tl.maximum(x, 0.0)
    elif KIND == "relu2":
        x = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    elif KIND == "sigmoid":
        x = sigmoid(x)
    elif KIND == "tanh":
        x = tanh(x)
    elif KIND == "quick_gelu":
        x = x * sigmoid(1.702 * x)
    elif KIND == "below_zero":
        x = tl.exp(tl.minimum(x, 0.0)) - 1.0 - tl.minimum(x, 0.0)
    else:
        tl.static_assert(KIND == "", "unknown activation")
    return x


@triton.jit
def rint(x):
    """Round to the nearest integer, halves to even, for |x| < 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def from_e4m3(bits):
    """Convert E4M3 bits (uint8) to float32. A float16 has the same fields, with an exponent bias larger by 8."""
    wide = bits.to(tl.uint16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def to_e4m3(x):
    """Return the bits (uint8) of the nearest E4M3 numbers, halves to even. Magnitudes above 448 become 448."""
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    small = rint(magnitude * 512.0).to(tl.uint32)
    code = tl.where(magnitude < 0.015625, small, normal)
    code = tl.where(x != x, 0x7F, code)
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit
def from_e5m2(bits):
    """Convert E5M2 bits (uint8) to float32. They are the upper half of a float16."""
    return (bits.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def coded(x, scale, KIND: tl.constexpr):
    """Return the codes of x / scale: int8 from -127 to 127, or E4M3 bits."""
    if KIND == "int8":
        return tl.minimum(tl.maximum(rint(x / scale), -127.0), 127.0).to(tl.int8)
    else:
        tl.static_assert(KIND == "e4m3", "unknown codes")
        return to_e4m3(x / scale)


@triton.jit
def code_scale(largest, KIND: tl.constexpr):
    """Return the scale that maps magnitudes up to `largest` to the full range of codes; 1 if `largest` is zero."""
    LARGEST: tl.constexpr = 127.0 if KIND == "int8" else 448.0
    return tl.where(largest > 0, largest / LARGEST, 1.0)


@triton.jit
def store_coded(out, scales, value, mask, groups, KIND: tl.constexpr, GROUP: tl.constexpr):
    """Store a row's codes at `out`, and the scales of its column groups.

    value: must be zero where the mask is False.
    """
    BLOCK: tl.constexpr = value.shape[0]
    COUNT: tl.constexpr = BLOCK // GROUP
    parts = tl.reshape(value, (COUNT, GROUP))
    # parts * 0.0 is zero for finite numbers and NaN for all others, so that the product is not finite either.
    # (Subtracting two equal products instead could leave the rounding error of one.)
    scale = code_scale(tl.max(tl.abs(parts), 1), KIND) + tl.sum(parts * 0.0, 1)
    g = tl.arange(0, COUNT)
    tl.store(scales + g, scale, g < groups)
    codes = tl.reshape(coded(parts, scale[:, None], KIND), (BLOCK,))
    tl.store(out + tl.arange(0, BLOCK), codes, mask)


@triton.jit
def finish(acc, at, column, mask, row_mask, bias, residual, residual_row):
    """Return acc + bias + residual, for output rows `at` and the given columns."""
    if bias is not None:
        acc += tl.load(bias + column, row_mask, 0).to(tl.float32)
    if residual is not None:
        acc += tl.load(residual + at * residual_row + column, mask, 0).to(tl.float32)
    return acc


def grid_of(*counts: int) -> tuple[int, ...]:
    """Return a launch grid. An empty one becomes a single program, whose masks keep it from writing anything."""
    return tuple(max(count, 1) for count in counts)


def as_bytes(x: Tensor) -> Tensor:
    """View float8 numbers as their bits. Return other tensors unchanged."""
    return x.view(torch.uint8) if x.dtype in FLOAT8_LARGEST else x


def require_columns(*tensors: Tensor | None) -> None:
    """Raise ValueError unless each tensor's columns are contiguous: kernels take no stride for columns."""
    for tensor in tensors:
        if tensor is not None and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"columns of a {list(tensor.shape)} tensor are {tensor.stride(-1)} elements apart, not 1")


def power_of_two(n: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least `n` and at least `least`."""
    return max(1 << max(n - 1, 0).bit_length(), least)


def tile(compiled: dict[str, Any], interpreted: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a kernel's tile, warps and stages: one choice, tuned in advance, or another under the interpreter.

    Nothing is tuned at launch. The choice depends only on shapes, so results are repeatable.
    """
    if not INTERPRETED:
        return compiled
    small = compiled | (interpreted or {})
    return {name: value for name, value in small.items() if name not in ("num_warps", "num_stages")}
