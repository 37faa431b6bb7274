"""The Triton kernels as a step calls them. Imported only where they run: on a GPU, or under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.backends import ExecutorLimits
from octavo.backends.sampling import uniform
from octavo.backends.torch.cache import LayerPages
from octavo.backends.torch.coded import CodedRows, CodeForm, Find, nowhere, places_in
from octavo.backends.torch.kernels.attention import Sequences, decode_attention, prefill_attention
from octavo.backends.torch.kernels.attention import parts_shape as parts_shape
from octavo.backends.torch.kernels.cache_view import CacheView
from octavo.backends.torch.kernels.dequantize import dequantize
from octavo.backends.torch.kernels.experts import Gate, Sorted, expert_gate, expert_linear, sort_by_expert
from octavo.backends.torch.kernels.gate import activated as activated
from octavo.backends.torch.kernels.gate import coded_rows, gated
from octavo.backends.torch.kernels.norm import layer_norm, rms_norm, rms_norm_coded
from octavo.backends.torch.kernels.planes import Planes
from octavo.backends.torch.kernels.recurrence import StateRows, delta_rule, selective_scan, short_conv
from octavo.backends.torch.kernels.rope import HeadSteps, prepare_heads, rotate
from octavo.backends.torch.kernels.rope import write_cache as write_heads
from octavo.backends.torch.kernels.sample import Entries, RowOptions, has_filters, row_options, sample_rows
from octavo.backends.torch.products import gate as gate
from octavo.backends.torch.products import linear as linear
from octavo.backends.torch.sampler import Samples, foreign_rows
from octavo.backends.torch.step import constant
from octavo.backends.torch.step_arrays import EqualSequences, StepArrays, sent
from octavo.batch import SAMPLING_ROW, SamplingBatch, SamplingRows
from octavo.graph.builder import Graph
from octavo.graph.ops.attention import AttentionParams, FusedAttention, Rope, RopeParams
from octavo.graph.ops.moe import MoE
from octavo.graph.ops.recurrence import GatedDeltaRule, SelectiveScan, ShortConv

HeadTensors = tuple[Tensor | None, Tensor | None, Tensor | None]


def experts(
    op: MoE,
    x: Tensor,
    choice: tuple[Tensor, Tensor],
    matrices: Sequence[Planes | Tensor],
    biases: Sequence[Tensor | None],
    *,
    repeats: bool,
) -> Tensor:
    """Compute a mixture of experts: x [rows, in] -> [rows, in].

    choice: experts and weights as for `TorchStep.experts`.
    matrices, biases: of gate, up and down.
    """
    chosen, weights = choice
    held = op.gate.shape[0]
    is_part = held < op.num_choices
    is_here = (chosen >= 0) & (chosen < held)
    if is_part:  # pairs of other ranks and of identities go to an extra expert, whose tiles are not computed
        chosen, weights = torch.where(is_here, chosen, held), torch.where(is_here, weights, 0.0)
    share, factors = chosen.shape[1], weights.reshape(-1).to(x.dtype)
    places = sort_by_expert(chosen, held + is_part)
    places = places._replace(expert_of=torch.where(places.expert_of < held, places.expert_of, -1))
    pairs, own = x, share
    if op.routing.on_input:
        pairs, own = (x[:, None] * factors.reshape(-1, share, 1)).flatten(0, 1), 1
    ending = Gate(op.kind, op.limit, op.up_offset, op.limits_activated)
    hidden = expert_gate(pairs, (matrices[0], matrices[1]), places, own, (biases[0], biases[1]), ending)
    last = None if op.routing.on_input else factors
    out = expert_linear(hidden, matrices[2], places, 1, biases[2], last, torch.float32).reshape(*chosen.shape, -1)
    out = torch.where(is_here[..., None], out, 0.0) if is_part else out
    # The order of a library's sum may depend on the number of rows.
    return (reduce(torch.add, out.unbind(1)) if repeats else out.sum(dim=1)).to(x.dtype)


def sorted_by_slot(slots: Tensor, num_slots: int) -> Sorted:
    """Sort the rows of a step by the slots [rows, 1] of their adapters; rows without an adapter (-1) are in no tile."""
    places = sort_by_expert(torch.where(slots < 0, num_slots, slots), num_slots + 1)
    return places._replace(expert_of=torch.where(places.expert_of < num_slots, places.expert_of, -1))


def low_rank(x: Tensor, a: Tensor, b: Tensor, places: Sorted) -> Tensor:
    """Multiply x [rows, in] by A [slots, rank, in] and B [slots, out, rank] of each row's slot -> float32 [rows, out].

    One launch computes the inner numbers of all adapters, a second one the outputs.
    places: result of `sorted_by_slot`; rows that are in no tile are not written.
    """
    inner = expert_linear(x, a, places, 1, dtype=torch.float32)
    return expert_linear(inner, b, places, 1, dtype=torch.float32)


def advanced(
    op: ShortConv | GatedDeltaRule | SelectiveScan,
    values: Sequence[Tensor],
    state: Tensor,
    weights: Sequence[Tensor | None],
    arrays: StepArrays,
    out: Tensor | None,
) -> Tensor:
    """Return the output of an operation on states [slots, ...], and advance the states.

    values, weights: in the kernel's order.
    """
    slots, saved, counts = arrays.state_slots, arrays.saved_slots, arrays.rows.save_counts
    assert slots is not None
    assert saved is not None
    saves = torch.full((len(slots), 1, 2), -1, dtype=torch.int32, device=slots.device)
    if counts is not None:
        saves = torch.stack([counts.T, saved.T], dim=2).contiguous()
    rows = StateRows(arrays.rows.first_rows, arrays.rows.sequences, arrays.rows.positions, slots, saves)
    args: Any = (*values, *weights)
    if isinstance(op, ShortConv):
        return short_conv(values[0], state, args[1:], op.kind, rows, out)
    if isinstance(op, GatedDeltaRule):
        return delta_rule(args[:3], state, args[3:], op.heads, op.eps, rows, out)
    return selective_scan(args[:2], state, args[2:], op.heads, rows, out)


def sampled(logits: Tensor, batch: SamplingBatch, num_top: int, draws: Tensor | None = None) -> Samples:
    """Sample tokens from logits [R, vocab], as `octavo.backends.torch.sampler.sample` does."""
    rows, device = batch.rows, logits.device
    foreign = foreign_rows(batch, logits.shape[1])

    def put(*arrays: NDArray[Any]) -> Any:
        return tuple(sent(array, device) for array in arrays)

    names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    entries = Entries(
        _flags(foreign.tobytes(), device),
        put(batch.bias_start, batch.bias_ids, batch.bias_values) if len(batch.bias_ids) else None,
        put(batch.history_start, batch.history_ids, batch.history_counts) if len(batch.history_ids) else None,
        put(*(rows[name] for name in names)) if len(batch.history_ids) else None,
        None if batch.allowed_mask is None else sent(batch.allowed_mask.view(np.int32), device),
    )
    options, is_filtered = _options(rows, device, draws)
    return Samples(*sample_rows(logits, options, entries, num_top, is_filtered=is_filtered))


def _options(rows: SamplingRows, device: torch.device, draws: Tensor | None) -> tuple[RowOptions, bool]:
    """Return the options of rows, and `has_filters`. If a step continues the same sequences, only the draws are sent.

    draws: random numbers of the rows; None means the ones in the options.
    """
    constant_rows = rows.copy()
    constant_rows["counter"] = 0
    options, is_filtered = _constant_options(constant_rows.tobytes(), device)
    if rows["temperature"].any():  # otherwise nothing is drawn
        found = sent(uniform(rows["seed"], rows["counter"]), device) if draws is None else draws
        options = options._replace(draws=found)
    return options, is_filtered


@lru_cache(maxsize=64)
def _constant_options(rows: bytes, device: torch.device) -> tuple[RowOptions, bool]:
    """Decode the options of rows from these bytes. Return them, with each row's first draw, and `has_filters`."""
    found = np.frombuffer(rows, SAMPLING_ROW)
    return row_options(found, device), has_filters(found)


@lru_cache(maxsize=64)
def _flags(flags: bytes, device: torch.device) -> Tensor:
    """Return booleans as int32 on the device."""
    return sent(np.frombuffer(flags, np.bool_).astype(np.int32), device)


def rows_of(p: Planes, index: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """Look up rows of a table -> [n, in]."""
    return dequantize(p, dtype, index, out)


def normed(x: Tensor, weight: Tensor | None, group: int, eps: float, out: Tensor | None) -> Tensor:
    """Apply RMSNorm to x [rows, cols] over groups of columns."""
    return rms_norm(x, weight, eps, group=group, out=out)


def layernormed(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor | None) -> Tensor:
    """Apply LayerNorm to x [rows, cols]."""
    return layer_norm(x, weight, bias, eps, out=out)


def normed_codes(x: Tensor, weight: Tensor, eps: float, form: CodeForm, find: Find) -> CodedRows:
    """Apply RMSNorm to x [rows, cols] and return the result as codes."""
    return rms_norm_coded(x, weight, eps, form, find)


def rotated(x: Tensor, head_dim: int, angles: Tensor, positions: Tensor, out: Tensor | None) -> Tensor:
    """Apply the rotary embedding to x [tokens, heads * head_dim]."""
    return rotate(x, head_dim, angles, positions, out)


def write_cache(pages: LayerPages, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Write keys and values [tokens, heads, dim] to their slots. Values without columns belong to a latent cache."""
    write_heads(keys, values if values.shape[-1] else None, _view(pages), slots)


def gated_product(x: Tensor, up: Tensor, kind: str, form: CodeForm | None, out: Tensor | None) -> Tensor | CodedRows:
    """Return kind(x) * up in `out`, or its codes, which are also in `out` unless that is the memory of x or `up`."""
    if form is None:
        return gated(x, kind, up=up, out=out)
    is_apart = out is not None and out.data_ptr() not in (x.data_ptr(), up.data_ptr())
    return coded_rows(x, form, kind, up, places_in(out) if out is not None and is_apart else nowhere)


def prepared_queries(
    op: FusedAttention,
    qkv: Tensor,
    pages: LayerPages,
    positions: Tensor,
    slots: Tensor,
    tensors: HeadTensors,
    out: Tensor | None,
) -> Tensor:
    """Apply head norms and rotation and write the cache, in one kernel -> queries [tokens, num_heads * head_dim].

    tensors: weights of the norms of q and k, and `angles`.
    """
    q_norm, k_norm, angles = tensors
    steps = HeadSteps(angles, q_norm, k_norm, (op.norms_q, op.norms_k, op.norms_v), op.eps)
    cache = _view(pages) if op.owns_cache else None
    return prepare_heads(qkv, cache, op.params, steps, slots, positions, out).flatten(1)


def angles(rope: RopeParams, positions: int, device: torch.device) -> Tensor:
    """Return cosines and sines [positions, 2, rotated pairs], computed in float64."""
    turned = torch.arange(positions, dtype=torch.float64)[:, None] * torch.tensor(rope.frequencies, dtype=torch.float64)
    table = torch.stack([turned.cos(), turned.sin()], dim=1) * rope.attention_factor
    return table.float().to(device)


def _view(pages: LayerPages) -> CacheView:
    values = pages.values if pages.values.shape[-1] else None
    factors = (pages.key_factor, pages.value_factor)
    return CacheView(pages.keys, values, pages.key_scales, pages.value_scales, *factors)


def attend(
    q: Tensor,
    pages: LayerPages,
    p: AttentionParams,
    some: EqualSequences,
    sinks: Tensor | None,
    *,
    repeats: bool,
    memory: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """Attend with q [n * t, num_heads, head_dim] of sequences with t tokens each -> [n * t, num_heads * value_dim].

    some: the sequences, with block tables from their first block on.
    repeats: sum in the same order whether or not a token is its sequence's only one in the step.
    memory: memory of the result and of `parts_shape`.
    """
    block_size, window, (out, parts) = pages.keys.shape[2], some.windows[pages.group], memory
    sequences = Sequences(some.starts, window.end, window.tables)
    cache = _view(pages)
    slopes = None if p.alibi_slopes is None else constant(p.alibi_slopes, torch.float32, q.device)
    tables = (None if sinks is None else sinks.float(), slopes)
    target = None if out is None else out.view(len(q), p.num_heads, p.cache.value_dim)
    if some.positions.shape[1] == 1 and not repeats:
        length = window.tables.shape[1] * block_size
        options: Any = {"tables_of": tables, "memory": (target, parts)}
        return decode_attention(q, cache, p, sequences, length, **options).flatten(1)
    return prefill_attention(q, cache, p, sequences, tables_of=tables, out=target).flatten(1)


def angles_bytes(graph: Graph, limits: ExecutorLimits) -> int:
    """Return the bytes of all `angles`, which are kept from step to step."""
    ropes = {node.op.rope for node in graph.nodes if isinstance(node.op, FusedAttention | Rope) and node.op.rope}
    return 4 * 2 * sum(len(rope.frequencies) for rope in ropes) * limits.max_model_len
