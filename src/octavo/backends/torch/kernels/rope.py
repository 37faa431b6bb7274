"""Head norms, rotary embedding and the write to the paged cache, in one launch between QKV and attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.backends.torch.kernels.cache_view import CacheView, cache_operands
from octavo.backends.torch.kernels.common import code_scale, coded, power_of_two, require_columns, tile, to_e4m3
from octavo.graph.ops.attention import AttentionParams

_TILE = tile({"num_warps": 2})


@dataclass(frozen=True, slots=True)
class HeadSteps:
    """The steps between QKV and attention. Tensors are on the device.

    angles: float32 [positions, 2, rotary pairs], cosines and sines for each position (computed in float64), multiplied
    by the factor of the embedding; None means no rotation.
    q_norm, k_norm: RMSNorm weights [head dim].
    norms: whether q, k and v are normalized; the norm of v has no weight.
    query_scales: float32 [n], additional factors of queries by position (`AttentionParams.query_scales`).
    """

    angles: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    norms: tuple[bool, bool, bool] = (False, False, False)
    eps: float = 0.0
    query_scales: Tensor | None = None


@triton.jit
def _rotated(x_at, c, mask, weight, is_normed, angles, position, eps, D: tl.constexpr, HALF: tl.constexpr):
    """Return one head [DP], normalized and rotated, in float32."""
    x = tl.load(x_at + c, mask, 0).to(tl.float32)
    factor = 1.0
    if is_normed:
        factor = 1.0 / tl.sqrt(tl.sum(x * x) / D + eps)
        x *= factor
        if weight is not None:
            x *= tl.load(weight + c, mask, 0).to(tl.float32)
    if angles is not None:
        pair = tl.where(c < HALF, c, c - HALF)
        other = tl.where(c < HALF, c + HALF, c - HALF)
        rotates = c < 2 * HALF
        y = tl.load(x_at + other, rotates, 0).to(tl.float32) * factor
        if is_normed and weight is not None:
            y *= tl.load(weight + other, rotates, 0).to(tl.float32)
        angle = angles + position.to(tl.int64) * (2 * HALF) + pair
        cos, sin = tl.load(angle, rotates, 1.0), tl.load(angle + HALF, rotates, 0.0)
        x = x * cos + tl.where(c < HALF, -y, y) * sin
    return x


@triton.jit
def _stored(x, pointers, scales, scale_at, mask, factor, KIND: tl.constexpr):
    """Write one head to the cache in the cache's number type."""
    if KIND == 1 or KIND == 4:
        tl.store(pointers, to_e4m3(x / factor), mask)
    elif KIND == 2:
        half = tl.minimum(tl.maximum(x / factor, -57344.0), 57344.0).to(tl.float16).to(tl.uint16, bitcast=True)
        rounded = half + 0x7F + ((half >> 8) & 1)
        # Rounding would carry a NaN into the sign bit.
        tl.store(pointers, (tl.where(x != x, 0x7E00, rounded) >> 8).to(tl.uint8), mask)
    elif KIND == 3:
        scale = code_scale(tl.max(tl.where(mask, tl.abs(x), 0.0)), "int8")
        tl.store(pointers, coded(x, scale, "int8"), mask)
        tl.store(scales + scale_at, scale)
    else:
        if pointers.dtype.element_ty == tl.float16:
            x = tl.where(tl.abs(x) < float("inf"), tl.minimum(tl.maximum(x, -65504.0), 65504.0), float("nan"))
        tl.store(pointers, x.to(pointers.dtype.element_ty), mask)


@triton.jit
def _heads(
    q_out, qkv, kv, slots, positions, angles, q_norm, k_norm, query_scales, eps, key_factor, value_factor, row, k_at,
    v_at, v_row, q_token, q_head, scale_length, scale_offset, num_scales, H: tl.constexpr, KVH: tl.constexpr,
    NORM_Q: tl.constexpr, NORM_K: tl.constexpr, NORM_V: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    DP: tl.constexpr, HALF: tl.constexpr, BS: tl.constexpr, KIND: tl.constexpr, HAS_CACHE: tl.constexpr,
    HAS_VALUES: tl.constexpr,
):  # fmt: skip
    # Triton compiles both branches of a runtime condition, even one whose operands are missing.
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + token)
    c = tl.arange(0, DP)
    if head < H:
        x = _rotated(qkv + token * row + head * D, c, c < D, q_norm, NORM_Q, angles, position, eps, D, HALF)
        if query_scales is not None:
            at = tl.minimum((position + scale_offset) // scale_length, num_scales - 1)
            x *= tl.load(query_scales + at)
        tl.store(q_out + token * q_token + head * q_head + c, x.to(q_out.dtype.element_ty), c < D)
    elif HAS_CACHE:
        slot = tl.load(slots + token)
        if slot >= 0:
            block, at = (slot // BS).to(tl.int64), slot % BS
            if head < H + KVH:
                h = head - H
                x = _rotated(k_at + token * row + h * D, c, c < D, k_norm, NORM_K, angles, position, eps, D, HALF)
                place = kv.key_data + block * kv.kb + h * kv.kh + at * kv.ks + c
                _stored(x, place, kv.key_scales, block * kv.kfb + h * kv.kfh + at, c < D, key_factor, KIND)
            elif HAS_VALUES:
                h = head - H - KVH
                x = _rotated(v_at + token * v_row + h * DV, c, c < DV, None, NORM_V, None, position, eps, DV, 0)
                place = kv.value_data + block * kv.vb + h * kv.vh + at * kv.vs + c
                _stored(x, place, kv.value_scales, block * kv.vfb + h * kv.vfh + at, c < DV, value_factor, KIND)


def prepare_heads(
    qkv: Tensor,
    cache: CacheView | None,
    p: AttentionParams,
    steps: HeadSteps,
    slots: Tensor,
    positions: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Return queries, normalized and rotated, [T, heads, key dim] in the dtype of qkv. Write keys and values to the
    cache.

    qkv: [T, q, k and v side by side], any row stride.
    cache: None if qkv has only queries because the layer uses another layer's keys.
    slots: int32 [T], block * block size + slot of each token; -1 for a padding row, which is not written.
    positions: int32 [T].
    out: tensor for the result.
    """
    tokens = qkv.shape[0]
    out = _queries(qkv, p) if out is None else out
    widths = p.widths
    k, v = (qkv[:, widths[0] :], qkv[:, widths[0] + widths[1] :]) if cache is not None else (qkv, qkv)
    return _launch((qkv, k, v), cache, p, steps, slots, positions, out) if tokens else out


def write_cache(keys: Tensor, values: Tensor | None, cache: CacheView, slots: Tensor) -> None:
    """Write keys [T, kv heads, key dim] and values [T, kv heads, value dim] to `slots` of the cache, unchanged.

    values: None for a latent, whose first columns are the values. The rows of a token are contiguous.
    """
    tokens, heads, dim = keys.shape
    if tokens:
        value_dim = None if values is None else values.shape[2]
        p = AttentionParams(0, 0, heads, dim, 1.0, value_dim=value_dim)
        flat = (keys.reshape(tokens, -1), (keys if values is None else values).reshape(tokens, -1))
        _launch((flat[0], *flat), cache, p, HeadSteps(), slots, slots, _queries(flat[0], p))


def _queries(qkv: Tensor, p: AttentionParams) -> Tensor:
    return torch.empty((qkv.shape[0], p.num_heads, p.head_dim), dtype=qkv.dtype, device=qkv.device)


def _launch(
    parts: tuple[Tensor, Tensor, Tensor],
    cache: CacheView | None,
    p: AttentionParams,
    steps: HeadSteps,
    slots: Tensor,
    positions: Tensor,
    out: Tensor,
) -> Tensor:
    qkv, k, v = parts
    require_columns(qkv, k, v)
    kv = None if cache is None else cache_operands(cache)
    has_values = cache is not None and cache.values is not None
    heads = p.num_heads + p.num_kv_heads * (0 if cache is None else 1 + has_values)
    scales = steps.query_scales
    _heads[(qkv.shape[0], heads)](
        out, qkv, kv, slots, positions, steps.angles, steps.q_norm, steps.k_norm, scales, steps.eps,
        1.0 if cache is None else cache.key_factor, 1.0 if cache is None else cache.value_factor, qkv.stride(0), k, v,
        v.stride(0), *out.stride()[:2], p.scale_length, p.scale_offset, 0 if scales is None else scales.shape[0],
        H=p.num_heads, KVH=p.num_kv_heads, NORM_Q=steps.norms[0], NORM_K=steps.norms[1], NORM_V=steps.norms[2],
        D=p.head_dim, DV=p.cache.value_dim, DP=power_of_two(max(p.head_dim, p.cache.value_dim)),
        HALF=0 if steps.angles is None else steps.angles.shape[2], BS=1 if cache is None else cache.keys.shape[2],
        KIND=0 if cache is None else cache.kind, HAS_CACHE=cache is not None, HAS_VALUES=has_values, **_TILE,
    )  # fmt: skip
    return out


@triton.jit
def _rotate(out, x, positions, angles, row, out_row, D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.arange(0, DP)
    at = x + token * row + head * D
    y = _rotated(at, c, c < D, None, False, angles, tl.load(positions + token), 0.0, D, HALF)
    tl.store(out + token * out_row + head * D + c, y.to(out.dtype.element_ty), c < D)


def rotate(x: Tensor, head_dim: int, angles: Tensor, positions: Tensor, out: Tensor | None = None) -> Tensor:
    """Apply only the rotary embedding: x [T, heads * head_dim], any row stride -> same shape.

    angles: as in `HeadSteps`.
    out: tensor for the result. It cannot be x, because threads read numbers that other threads overwrite.
    """
    require_columns(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if x.shape[0]:
        _rotate[(x.shape[0], x.shape[1] // head_dim)](
            out, x, positions, angles, x.stride(0), out.stride(0), D=head_dim, DP=power_of_two(head_dim),
            HALF=angles.shape[2], **_TILE,
        )  # fmt: skip
    return out
