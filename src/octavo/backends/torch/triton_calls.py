"""The Triton kernels as a step calls them. Imported only where they run: on a GPU, or under Triton's interpreter."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.backends import ExecutorLimits
from octavo.backends.torch.cache import LayerPages
from octavo.backends.torch.kernels.attention import PART_TOKENS, Sequences, decode_attention, prefill_attention
from octavo.backends.torch.kernels.cache_view import CacheView
from octavo.backends.torch.kernels.dequantize import dequantize
from octavo.backends.torch.kernels.gate import gated
from octavo.backends.torch.kernels.linear import linear
from octavo.backends.torch.kernels.norm import rms_norm
from octavo.backends.torch.kernels.planes import Planes
from octavo.backends.torch.kernels.rope import HeadSteps, prepare_heads
from octavo.backends.torch.quantized import matrix_of
from octavo.backends.torch.step import StepRows, constant
from octavo.backends.torch.step_arrays import EqualSequences, VisibleBlocks
from octavo.graph.builder import Graph
from octavo.graph.ops import AttentionParams, FusedAttention, RopeParams

HeadTensors = tuple[Tensor | None, Tensor | None, Tensor | None]

_MANY_ROWS = 512  # from here on a matrix is written out once and multiplied by the library


def product(x: Tensor, p: Planes, index: int | None = None) -> Tensor:
    """x [rows, in] times the transpose of a matrix [out, in], or of one of a stack."""
    matrix, x = p if index is None else matrix_of(p, index), p.ordered(x)
    if len(x) >= _MANY_ROWS:
        return torch.nn.functional.linear(x, dequantize(matrix, x.dtype))
    return linear(x, matrix)


def rows_of(p: Planes, index: Tensor, dtype: torch.dtype) -> Tensor:
    """These rows of a table [n, in]."""
    return dequantize(p, dtype, index)


def normed(x: Tensor, weight: Tensor | None, group: int, eps: float) -> Tensor:
    """x [rows, cols] with RMSNorm over groups of columns."""
    return rms_norm(x, weight, eps, group=group)[0]


def gated_product(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """kind(gate) * up"""
    return gated(gate, kind, up=up)


def prepared_queries(
    op: FusedAttention, qkv: Tensor, pages: LayerPages, rows: StepRows, slots: Tensor, tensors: HeadTensors
) -> Tensor:
    """Head norms, rotation and cache write in one kernel -> queries [tokens, num_heads * head_dim].

    tensors: weights of the norms of q and k, and `angles`.
    """
    q_norm, k_norm, angles = tensors
    steps = HeadSteps(angles, q_norm, k_norm, (op.norms_q, op.norms_k, op.norms_v), op.eps)
    cache = _view(pages) if op.owns_cache else None
    return prepare_heads(qkv, cache, op.params, steps, slots.int(), rows.positions.int()).flatten(1)


def angles(rope: RopeParams, positions: int, device: torch.device) -> Tensor:
    """Cosines and sines [positions, 2, rotated pairs], computed in float64."""
    turned = torch.arange(positions, dtype=torch.float64)[:, None] * torch.tensor(rope.frequencies, dtype=torch.float64)
    table = torch.stack([turned.cos(), turned.sin()], dim=1) * rope.attention_factor
    return table.float().to(device)


def _view(pages: LayerPages) -> CacheView:
    return CacheView(pages.keys, pages.values if pages.values.shape[-1] else None)


def attend(
    q: Tensor,
    pages: LayerPages,
    p: AttentionParams,
    some: EqualSequences,
    window: VisibleBlocks,
    sinks: Tensor | None,
) -> Tensor:
    """q [n * t, num_heads, head_dim] of sequences with t tokens each -> [n * t, num_heads, value_dim].

    window: block tables from the first block of a sequence on.
    """
    n, t = some.positions.shape
    block_size = pages.keys.shape[2]
    starts = torch.arange(0, n * t + 1, t, dtype=torch.int32, device=q.device)
    sequences = Sequences(starts, window.end.int(), window.tables.int())
    cache = _view(pages)
    slopes = None if p.alibi_slopes is None else constant(p.alibi_slopes, torch.float32, q.device)
    tables = (None if sinks is None else sinks.float(), slopes)
    if t == 1:
        return decode_attention(q, cache, p, sequences, window.tables.shape[1] * block_size, tables_of=tables)
    return prefill_attention(q, cache, p, sequences, tables_of=tables)


def workspace_bytes(graph: Graph, limits: ExecutorLimits) -> int:
    """Bytes that the kernels need beside the values of a step: `angles`, and the parts of a decode step's attention."""
    ops = [node.op for node in graph.nodes]
    pairs = sum(len(rope.frequencies) for rope in {op.rope for op in ops if isinstance(op, FusedAttention) and op.rope})
    params = [p for op in ops if isinstance(p := getattr(op, "params", None), AttentionParams)]
    parts = -(-limits.max_model_len // PART_TOKENS)
    of_sequence = max((p.num_heads * (p.cache.value_dim + 1) * parts for p in params), default=0) if parts > 1 else 0
    return 4 * (2 * pairs * limits.max_model_len + of_sequence * limits.max_num_seqs)
