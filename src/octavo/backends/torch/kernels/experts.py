"""Products of a mixture of experts: rows are sorted by expert, and one launch covers the tiles of all experts.

The sort runs on the device with fixed shapes, so that it can be part of a CUDA graph: each expert's rows are padded to
whole tiles, and the number of tiles is always the number that the worst case needs. Tiles without rows finish
immediately.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.backends.torch.kernels.common import LOAD_F32, operand, require_columns, tile
from octavo.backends.torch.kernels.gate import gated, gated_values
from octavo.backends.torch.kernels.linear import product_tile
from octavo.backends.torch.kernels.planes import Planes
from octavo.backends.torch.kernels.tiles import chunks_of, constants, for_decoding, operands

_TILE = tile({"BN": 64, "num_warps": 4, "num_stages": 3}, {"BN": 32})
_DENSE = tile({"BN": 64, "BK": 64, "num_warps": 4, "num_stages": 3}, {"BN": 32, "BK": 32})


class Sorted(NamedTuple):
    """(row, chosen expert) pairs, grouped into tiles. P = rows * top_k pairs; pair r * top_k + j is choice j of row r.

    pairs: int32 [tiles * tile_rows], -1 for unused rows of a tile.
    expert_of: int32 [tiles], -1 for an empty tile.
    """

    pairs: Tensor
    expert_of: Tensor
    tile_rows: int


def sort_by_expert(chosen: Tensor, num_experts: int, tile_rows: int = 16) -> Sorted:
    """Sort the pairs of rows and experts by expert, without waiting for the host.

    Pairs of the same expert keep their order, so results are the same in every run.

    chosen: [rows, top_k], the experts of each row.
    tile_rows: a power of two, at least 16.
    """
    flat = chosen.reshape(-1).long()
    count = flat.numel()
    tiles = min(count, num_experts) + count // tile_rows  # at most this many tiles contain a row
    sizes = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    sizes.scatter_add_(0, flat, torch.ones_like(flat))
    ends = torch.cumsum((sizes + tile_rows - 1) // tile_rows, 0)
    order = torch.argsort(flat, stable=True)
    experts = flat[order]
    begins = torch.cumsum(sizes, 0) - sizes
    padded = (ends[experts] - (sizes[experts] + tile_rows - 1) // tile_rows) * tile_rows
    places = padded + torch.arange(count, device=flat.device) - begins[experts]
    pairs = torch.full((max(tiles, 1) * tile_rows,), -1, dtype=torch.int32, device=flat.device)
    pairs[places] = order.int()
    number = torch.arange(max(tiles, 1), device=flat.device)
    expert_of = torch.searchsorted(ends, number, right=True)
    return Sorted(pairs, torch.where(expert_of < num_experts, expert_of, -1).int(), tile_rows)


@triton.jit
def _with_bias(acc, bias, expert, rows, N):
    """Return acc [weight rows, pairs] + bias [experts, N]."""
    if bias is not None:
        acc += tl.load(bias + expert.to(tl.int64) * N + rows, rows < N, 0).to(tl.float32)[:, None]
    return acc


@triton.jit
def _store(out, acc, rows, pair, N, out_row, factors):
    """Multiply acc [weight rows, pairs] by the factor of each pair and store each pair as a row."""
    if factors is not None:
        acc *= tl.load(factors + pair, pair >= 0, 0).to(tl.float32)[None, :]
    at = pair.to(tl.int64)[None, :] * out_row + rows[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), (rows < N)[:, None] & (pair >= 0)[None, :])


@triton.jit
def _packed_experts(
    out, x, w, up, pairs, expert_of, bias, up_bias, factors, limit, offset, N, width, x_row, out_row,
    SHARE: tl.constexpr, KIND: tl.constexpr, AFTER: tl.constexpr, FORMAT: tl.constexpr, C: tl.constexpr,
    UP_FORMAT: tl.constexpr, UP_C: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    expert = tl.load(expert_of + tl.program_id(1))
    if expert >= 0:
        pair = tl.load(pairs + tl.program_id(1) * BM + tl.arange(0, BM))
        rows = tl.program_id(0) * BN + tl.arange(0, BN)
        at = (pair // SHARE).to(tl.int64) * x_row
        blocks = tl.cdiv(width, 128)
        own = expert.to(tl.int64) * w.rows + rows
        acc = tl.zeros((BN, BM), tl.float32)
        acc = product_tile(acc, x, at, pair >= 0, w, own, rows < N, 0, blocks, width, FORMAT, C)
        acc = _with_bias(acc, bias, expert, rows, N)
        if KIND != "":
            other = tl.zeros((BN, BM), tl.float32)
            other = product_tile(other, x, at, pair >= 0, up, own, rows < N, 0, blocks, width, UP_FORMAT, UP_C)
            acc = gated_values(acc, _with_bias(other, up_bias, expert, rows, N), limit, offset, KIND, AFTER)
        _store(out, acc, rows, pair, N, out_row, factors)


@triton.jit
def _plain_tile(acc, x_at, has_row, w_at, is_row, width, BK: tl.constexpr):
    """Return acc [weight rows, pairs] + w @ x.T.

    x_at, w_at: pointers to the first column of each row.
    """
    for first in range(0, width, BK):
        k = first + tl.arange(0, BK)
        xs = operand(tl.load(x_at[None, :] + k[:, None], has_row[None, :] & (k < width)[:, None], 0))
        ws = operand(tl.load(w_at[:, None] + k[None, :], is_row[:, None] & (k < width)[None, :], 0))
        acc = tl.dot(ws, xs if LOAD_F32 else xs.to(ws.dtype), acc, input_precision="ieee")
    return acc


@triton.jit
def _plain_experts(
    out, x, w, up, pairs, expert_of, bias, up_bias, factors, limit, offset, N, width, x_row, out_row, w_expert, w_row,
    up_expert, up_row, SHARE: tl.constexpr, KIND: tl.constexpr, AFTER: tl.constexpr, BN: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    expert = tl.load(expert_of + tl.program_id(1))
    if expert >= 0:
        pair = tl.load(pairs + tl.program_id(1) * BM + tl.arange(0, BM))
        rows = tl.program_id(0) * BN + tl.arange(0, BN)
        wide = rows.to(tl.int64)
        x_at = x + (pair // SHARE).to(tl.int64) * x_row
        acc = tl.zeros((BN, BM), tl.float32)
        acc = _plain_tile(acc, x_at, pair >= 0, w + expert.to(tl.int64) * w_expert + wide * w_row, rows < N, width, BK)
        acc = _with_bias(acc, bias, expert, rows, N)
        if KIND != "":
            up_at = up + expert.to(tl.int64) * up_expert + wide * up_row
            other = _plain_tile(tl.zeros((BN, BM), tl.float32), x_at, pair >= 0, up_at, rows < N, width, BK)
            acc = gated_values(acc, _with_bias(other, up_bias, expert, rows, N), limit, offset, KIND, AFTER)
        _store(out, acc, rows, pair, N, out_row, factors)


class Gate(NamedTuple):
    """The gate applied to the two products: kind(min(gate, limit)) * (clip(up, limit) + offset).

    after: apply the limit to kind(gate) rather than to the gate.
    """

    kind: str
    limit: float | None = None
    offset: float = 0.0
    after: bool = False


def expert_linear(
    x: Tensor,
    weight: Planes | Tensor,
    places: Sorted,
    top_k: int,
    bias: Tensor | None = None,
    factors: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply each pair's row by the matrix of its expert -> [rows * top_k, out], one row per pair.

    x: [rows, in], shared by all pairs of a row, or [rows * top_k, in], one row for each pair.
    weight: [experts, out, in].
    bias: [experts, out].
    factors: [rows * top_k], multiplied into the results.
    """
    out = torch.empty((x.shape[0] * top_k, weight.shape[1]), dtype=dtype or x.dtype, device=x.device)
    return _launch(out, x, (weight, None), places, top_k, (bias, None), factors, Gate(""))


def expert_gate(
    x: Tensor,
    weights: tuple[Planes | Tensor, Planes | Tensor],
    places: Sorted,
    top_k: int,
    biases: tuple[Tensor | None, Tensor | None],
    gate: Gate,
) -> Tensor:
    """Apply `expert_linear` with two matrices, gate and up, and gate the results -> [rows * top_k, out] in the dtype of
    x.

    One launch does all of it unless only one of the matrices is quantized.
    """
    first, second = weights
    if isinstance(first, Planes) != isinstance(second, Planes):  # one is quantized, the other is not: one launch each
        a, b = (expert_linear(x, w, places, top_k, bias) for w, bias in zip(weights, biases, strict=True))
        return gated(a, gate.kind, limit=gate.limit, offset=gate.offset, after=gate.after, up=b)
    out = torch.empty((x.shape[0] * top_k, first.shape[1]), dtype=x.dtype, device=x.device)
    return _launch(out, x, weights, places, top_k, biases, None, gate)


def _launch(
    out: Tensor,
    x: Tensor,
    weights: tuple[Planes | Tensor, Planes | Tensor | None],
    places: Sorted,
    top_k: int,
    biases: tuple[Tensor | None, Tensor | None],
    factors: Tensor | None,
    gate: Gate,
) -> Tensor:
    """Write the products to `out` and return it."""
    weight, up = weights
    require_columns(x, *(w for w in weights if isinstance(w, Tensor)))
    if not len(out):
        return out
    rest = (places.pairs, places.expert_of, *biases, factors, gate.limit, gate.offset)
    sizes = (*weight.shape[1:], x.stride(0), out.stride(0))
    chosen = for_decoding(weight, _TILE) if isinstance(weight, Planes) else _DENSE
    grid = (-(-weight.shape[1] // chosen["BN"]), places.expert_of.shape[0])
    meta = chosen | {"BM": places.tile_rows, "SHARE": top_k, "KIND": gate.kind, "AFTER": gate.after}
    if isinstance(weight, Planes):
        second = weight if up is None else up
        assert isinstance(second, Planes)
        form = constants(weight) | {"C": chunks_of(weight, 128)}
        form |= {"UP_FORMAT": constants(second)["FORMAT"], "UP_C": chunks_of(second, 128)}
        upper = None if up is None else operands(second)
        _packed_experts[grid](out, x, operands(weight), upper, *rest, *sizes, **form, **meta)
    else:
        strides = (*weight.stride()[:2], *(up.stride()[:2] if isinstance(up, Tensor) else (0, 0)))
        _plain_experts[grid](out, x, weight, up, *rest, *sizes, *strides, **meta)
    return out
