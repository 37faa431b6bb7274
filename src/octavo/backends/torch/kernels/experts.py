"""Products of a mixture of experts: rows sorted by their expert, and one launch over the tiles of all experts.

The sort runs on the device with fixed shapes, so that a graph can hold it: each expert's rows are padded to whole
tiles, and there are always as many tiles as the worst case needs. A tile without rows ends at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.backends.torch.kernels.common import LOAD_F32, operand, require_columns, tile
from octavo.backends.torch.kernels.linear import chunks_of, product_tile
from octavo.backends.torch.kernels.planes import Planes
from octavo.backends.torch.kernels.tiles import constants, operands

_TILE = tile({"BN": 64, "num_warps": 4, "num_stages": 3}, {"BN": 32})
_DENSE = tile({"BN": 64, "BK": 64, "num_warps": 4, "num_stages": 3}, {"BN": 32, "BK": 32})


class Sorted(NamedTuple):
    """Pairs of row and chosen expert in tiles. P = rows * top_k pairs, pair r * top_k + j is choice j of row r.

    pairs: int32 [tiles * tile_rows], -1 where a tile has no further row. expert_of: int32 [tiles], -1: an empty tile.
    """

    pairs: Tensor
    expert_of: Tensor
    tile_rows: int


def sort_by_expert(chosen: Tensor, num_experts: int, tile_rows: int = 16) -> Sorted:
    """chosen: [rows, top_k], the experts of each row. tile_rows: a power of two from 16 on. Nothing waits for the host.

    Pairs of one expert keep their order, so results do not depend on the run.
    """
    flat = chosen.reshape(-1).long()
    count = flat.numel()
    tiles = min(count, num_experts) + count // tile_rows  # of which each holds a row, at most
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
def _finish(out, acc, rows, pair, mask, expert, N, out_row, bias, factors):
    """Stores acc [rows of the weight, pairs] as rows of pairs, + bias, times the factor of the pair."""
    if bias is not None:
        acc += tl.load(bias + expert.to(tl.int64) * N + rows, rows < N, 0).to(tl.float32)[:, None]
    if factors is not None:
        acc *= tl.load(factors + pair, pair >= 0, 0).to(tl.float32)[None, :]
    at = pair.to(tl.int64)[None, :] * out_row + rows[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask)


@triton.jit
def _packed_experts(
    out, x, w, pairs, expert_of, bias, factors, N, width, x_row, out_row, SHARE: tl.constexpr, FORMAT: tl.constexpr,
    C: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    expert = tl.load(expert_of + tl.program_id(1))
    if expert >= 0:
        pair = tl.load(pairs + tl.program_id(1) * BM + tl.arange(0, BM))
        rows = tl.program_id(0) * BN + tl.arange(0, BN)
        has_row = pair >= 0
        acc = tl.zeros((BN, BM), tl.float32)
        at = (pair // SHARE).to(tl.int64) * x_row
        weight_rows = expert.to(tl.int64) * w.rows + rows
        acc = product_tile(acc, x, at, has_row, w, weight_rows, rows < N, 0, tl.cdiv(width, 128), width, FORMAT, C)
        _finish(out, acc, rows, pair, (rows < N)[:, None] & has_row[None, :], expert, N, out_row, bias, factors)


@triton.jit
def _plain_experts(
    out, x, w, pairs, expert_of, bias, factors, N, width, x_row, out_row, w_expert, w_row, SHARE: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    expert = tl.load(expert_of + tl.program_id(1))
    if expert >= 0:
        pair = tl.load(pairs + tl.program_id(1) * BM + tl.arange(0, BM))
        rows = tl.program_id(0) * BN + tl.arange(0, BN)
        has_row = pair >= 0
        acc = tl.zeros((BN, BM), tl.float32)
        x_at = x + (pair // SHARE).to(tl.int64) * x_row
        w_at = w + expert.to(tl.int64) * w_expert + rows.to(tl.int64) * w_row
        for first in range(0, width, BK):
            k = first + tl.arange(0, BK)
            xs = operand(tl.load(x_at[None, :] + k[:, None], has_row[None, :] & (k < width)[:, None], 0))
            ws = operand(tl.load(w_at[:, None] + k[None, :], (rows < N)[:, None] & (k < width)[None, :], 0))
            acc = tl.dot(ws, xs if LOAD_F32 else xs.to(ws.dtype), acc, input_precision="ieee")
        _finish(out, acc, rows, pair, (rows < N)[:, None] & has_row[None, :], expert, N, out_row, bias, factors)


def expert_linear(
    x: Tensor,
    weight: Planes | Tensor,
    places: Sorted,
    top_k: int,
    bias: Tensor | None = None,
    factors: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The product of each pair with the matrix of its expert -> [rows * top_k, out], one row a pair.

    x: [rows, in], of which all pairs of a row take the same; or [rows * top_k, in], one row a pair. weight: of shape
    [experts, out, in]. bias: [experts, out]. factors: [rows * top_k], by which the results are multiplied.
    """
    require_columns(x, weight if isinstance(weight, Tensor) else None)
    _, features, width = weight.shape
    pairs = (places.pairs, places.expert_of, bias, factors)
    count = x.shape[0] if top_k == 1 else None
    share = top_k
    total = count if count is not None else x.shape[0] * top_k
    out = torch.empty((total, features), dtype=dtype or x.dtype, device=x.device)
    if total == 0:
        return out
    sizes = (features, width, x.stride(0), out.stride(0))
    chosen = _TILE if isinstance(weight, Planes) else _DENSE
    grid = (-(-features // chosen["BN"]), places.expert_of.shape[0])
    meta = chosen | {"BM": places.tile_rows, "SHARE": share}
    if isinstance(weight, Planes):
        form = constants(weight) | {"C": chunks_of(weight, 128)}
        _packed_experts[grid](out, x, operands(weight), *pairs, *sizes, **form, **meta)
    else:
        _plain_experts[grid](out, x, weight, *pairs, *sizes, *weight.stride()[:2], **meta)
    return out
