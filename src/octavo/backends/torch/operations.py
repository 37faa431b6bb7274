"""The torch form of every operation: differentiable, on any device, its meaning that of `octavo.graph.ops`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from octavo.backends.torch.attention import attend_all
from octavo.backends.torch.coded import CodedRows
from octavo.backends.torch.plain import ACTIVATIONS, rotate, wide
from octavo.backends.torch.recurrence import delta_rule, selective_scan, short_conv
from octavo.backends.torch.step import TorchStep, constant
from octavo.errors import GraphError
from octavo.graph.builder import Node
from octavo.graph.ops.attention import Attention, FusedAttention, Rope
from octavo.graph.ops.base import Op
from octavo.graph.ops.collective import AllGather, AllReduce
from octavo.graph.ops.encoder import CrossAttention, EncoderAttention, MeanPool, TokenTypeEmbedding
from octavo.graph.ops.latent_attention import HeadLinear, LatentAttention
from octavo.graph.ops.linear import Embedding, FusedLinear, Input, Linear, Logits, PositionEmbedding
from octavo.graph.ops.moe import MoE, Routing
from octavo.graph.ops.recurrence import GatedDeltaRule, SelectiveScan, ShortConv
from octavo.graph.ops.rows import Gather, Splice
from octavo.graph.ops.rowwise import Activation, Add, Clip, GatedActivation, LayerNorm, Mul, RMSNorm, Scale, Softcap
from octavo.graph.ops.spanning_norm import GroupSums, NormColumns, SpanningNorm
from octavo.graph.ops.stages import Receive, Send
from octavo.graph.ops.streams import (
    AddToStreams,
    Columns,
    MatchMagnitude,
    MixStreams,
    ScaleColumns,
    SideBySide,
    Sparsify,
)
from octavo.graph.values import Parameter

OpType = TypeVar("OpType", bound=Op)
Form = Callable[[OpType, TorchStep], Tensor | CodedRows]
FORMS: dict[type[Op], Form[Any]] = {}


def evaluate(node: Node, step: TorchStep) -> None:
    """Gives the step the output of one operation, in its place if it has one. Where no row is wanted, nothing runs.

    Raises GraphError naming an operation without a torch form.
    """
    check_operation(node)
    if not step.count_of(node.output.rows):
        # As in every part of a prompt but the last: neither forms nor kernels are made for matrices without rows.
        step.values[node.output] = torch.empty((0, node.output.cols), device=step.rows.wanted.device)
        return
    step.begin(node)
    found, out = FORMS[type(node.op)](node.op, step), step.out
    if isinstance(found, CodedRows):
        step.codes[node.output] = found
    elif out is None or (found.data_ptr() == out.data_ptr() and found.shape == out.shape):
        step.values[node.output] = found
    else:
        step.values[node.output] = out.copy_(found)


def check_operation(node: Node) -> None:
    """Raises GraphError naming the operation if it has no torch form."""
    if type(node.op) not in FORMS:
        raise GraphError(f"{node.layer}: {node.op.name}: the torch backend has no form of this operation")


def _form(kind: type[OpType]) -> Callable[[Form[OpType]], Form[OpType]]:
    def register(form: Form[OpType]) -> Form[OpType]:
        FORMS[kind] = form
        return form

    return register


def softcap(x: Tensor, cap: float, out: Tensor | None = None) -> Tensor:
    return torch.mul(torch.tanh(torch.div(x, cap, out=out), out=out), cap, out=out)


@_form(Send)
def _send(op: Send, step: TorchStep) -> Tensor:
    return step.values[op.x]


@_form(Receive)
@_form(Input)
def _input(op: Input, step: TorchStep) -> Tensor:
    return step.inputs[op.slot]  # which `evaluate` copies, in the type of values


@_form(Embedding)
def _embedding(op: Embedding, step: TorchStep) -> Tensor:
    ids = step.rows.token_ids
    if not op.has_all:
        ids = torch.where(ids < op.num_rows, ids, 0)
    if not op.total:
        return step.embed(ids, op.weight, step.out)
    rows = ids - op.first
    is_here = (rows >= 0) & (rows < op.weight.shape[0])
    found = step.embed(torch.where(is_here, rows, 0), op.weight, step.out)
    return torch.where(is_here[:, None], found, 0.0)


@_form(PositionEmbedding)
def _position_embedding(op: PositionEmbedding, step: TorchStep) -> Tensor:
    positions = step.rows.positions + op.offset if op.offset else step.rows.positions
    return step.embed(positions, op.weight, step.out)


@_form(TokenTypeEmbedding)
def _token_type_embedding(op: TokenTypeEmbedding, step: TorchStep) -> Tensor:
    types = step.rows.token_types
    return step.embed(torch.zeros_like(step.rows.token_ids) if types is None else types, op.weight, step.out)


@_form(Linear)
def _plain_linear(op: Linear, step: TorchStep) -> Tensor:
    return step.linear(step.rows_of(op.x), (op.weight,), (op.bias,), out=step.out)


@_form(HeadLinear)
def _head_linear(op: HeadLinear, step: TorchStep) -> Tensor:
    heads, out_features, in_features = op.weight.shape
    x = step.values[op.x].reshape(-1, heads, in_features)
    return step.stacked_product(x, op.weight).reshape(-1, heads * out_features)


@_form(Logits)
def _logits(op: Logits, step: TorchStep) -> Tensor:
    x, out = step.values[op.x], step.out
    dtype = torch.promote_types(x.dtype, torch.float32)
    logits = step.linear(x, (op.weight,), (op.bias,), dtype=dtype, out=out)
    logits = logits if op.scale == 1.0 else torch.mul(logits, op.scale, out=out)
    return logits if op.softcap is None else softcap(logits, op.softcap, out)


@_form(Gather)
def _gather(op: Gather, step: TorchStep) -> Tensor:
    index = step.index_of(op.index)
    assert index is not None
    if op.width == 1:
        return torch.index_select(step.values[op.x], 0, index, out=step.out)
    return step.values[op.x][index].reshape(-1, op.width * op.x.cols)


@_form(Splice)
def _splice(op: Splice, step: TorchStep) -> Tensor:
    x, index = step.values[op.x], step.index_of(op.index)
    if index is None or not step.count_of(op.given.rows):
        return x
    given = step.values[op.given][index.clamp(min=0)]
    return torch.where((index >= 0)[:, None], given.to(x.dtype), x)


@_form(FusedLinear)
def _fused_linear(op: FusedLinear, step: TorchStep) -> Tensor | CodedRows:
    x = step.rows_of(op.x)
    if op.norm is not None:
        x = step.normed_for(step.values[op.x], op.norm, op.eps, op.weights)
    residual = None if op.residual is None else step.values[op.residual]
    if op.kind is None:
        return step.linear(x, op.weights, op.biases, residual, out=step.out)
    if residual is None:
        return step.gate_product(x, op, step.out)
    # The place of the output may be that of the residual.
    found = step.gate_product(x, op, step.find((len(x), op.weights[0].shape[0]), x.dtype))
    assert isinstance(found, Tensor), "a product takes no codes of a sum"
    return torch.add(found, residual, out=step.out)


@_form(Add)
def _add(op: Add, step: TorchStep) -> Tensor:
    return torch.add(step.values[op.a], step.values[op.b], out=step.out)


@_form(Mul)
def _mul(op: Mul, step: TorchStep) -> Tensor:
    return torch.mul(step.values[op.a], step.values[op.b], out=step.out)


@_form(Scale)
def _scale(op: Scale, step: TorchStep) -> Tensor:
    return torch.mul(step.values[op.x], op.factor, out=step.out)


@_form(Activation)
def _activation(op: Activation, step: TorchStep) -> Tensor:
    return step.activated(step.values[op.x], op.kind, step.out)


@_form(GatedActivation)
def _gated_activation(op: GatedActivation, step: TorchStep) -> Tensor | CodedRows:
    return step.gated(step.values[op.gate], step.values[op.up], op, step.out)


@_form(Softcap)
def _softcap(op: Softcap, step: TorchStep) -> Tensor:
    return softcap(step.values[op.x], op.cap, step.out)


@_form(Clip)
def _clip(op: Clip, step: TorchStep) -> Tensor:
    return torch.clamp(step.values[op.x], -op.limit, op.limit, out=step.out)


@_form(RMSNorm)
def _rms_norm(op: RMSNorm, step: TorchStep) -> Tensor:
    weight = None if op.weight is None else step.weight(op.weight)
    return step.normed(step.values[op.x], weight, op.columns, op.eps, step.out)


@_form(LayerNorm)
def _layer_norm(op: LayerNorm, step: TorchStep) -> Tensor:
    x, weight = step.values[op.x], step.weight(op.weight)
    bias = None if op.bias is None else step.weight(op.bias)
    if op.columns == op.x.cols:
        return step.layernormed(x, weight, bias, op.eps, step.out)
    groups = wide(x).reshape(x.shape[0], -1, op.columns)
    normed = functional.layer_norm(groups, groups.shape[-1:], None, None, op.eps).flatten(-2) * wide(weight)
    return (normed if bias is None else normed + wide(bias)).to(x.dtype)


class _Groups(NamedTuple):
    """The groups of columns of which a rank has some: those from `first` to `last`, and columns that it lacks there."""

    first: int
    last: int
    before: int
    after: int

    @classmethod
    def of(cls, span: NormColumns, cols: int) -> _Groups:
        end = span.begin + cols
        first, last = span.begin // span.group, (end - 1) // span.group
        return cls(first, last, span.begin - first * span.group, (last + 1) * span.group - end)


def _of_columns(of_groups: Tensor, span: NormColumns, cols: int) -> Tensor:
    """The number of each column's group, of those of all groups [rows, num_groups]."""
    found = _Groups.of(span, cols)
    own = of_groups[:, found.first : found.last + 1, None].expand(-1, -1, span.group)
    return own.flatten(1)[:, found.before : found.before + cols]


def _centered(op: GroupSums | SpanningNorm, step: TorchStep) -> Tensor:
    """x without its mean over all ranks, in float32 or wider."""
    x = wide(step.values[op.x])
    return x if op.sums is None else x - _of_columns(step.values[op.sums], op.span, op.x.cols) / op.span.group


@_form(GroupSums)
def _group_sums(op: GroupSums, step: TorchStep) -> Tensor:
    # No additions by index: on a GPU they come in any order.
    x, found = _centered(op, step), _Groups.of(op.span, op.x.cols)
    whole = functional.pad(x**op.power, (found.before, found.after)).reshape(len(x), -1, op.span.group)
    return functional.pad(step.sums(whole)[..., 0], (found.first, op.span.num_groups - found.last - 1))


@_form(SpanningNorm)
def _spanning_norm(op: SpanningNorm, step: TorchStep) -> Tensor:
    squares = _of_columns(step.values[op.squares], op.span, op.x.cols)
    out = _centered(op, step) * torch.rsqrt(squares / op.span.group + op.eps)
    out = out if op.weight is None else out * wide(step.weight(op.weight))
    return (out if op.bias is None else out + wide(step.weight(op.bias))).to(step.values[op.x].dtype)


@_form(Columns)
def _columns(op: Columns, step: TorchStep) -> Tensor:
    return step.values[op.x][:, op.begin : op.begin + op.count]


@_form(SideBySide)
def _side_by_side(op: SideBySide, step: TorchStep) -> Tensor:
    return torch.cat([step.values[op.a], step.values[op.b]], dim=1, out=step.out)


@_form(MixStreams)
def _mix_streams(op: MixStreams, step: TorchStep) -> Tensor:
    x, coefficients = step.values[op.x], step.values[op.coefficients]
    n = math.isqrt(op.coefficients.cols)
    streams, factors = x.reshape(len(x), n, -1), coefficients.reshape(len(x), n, n)
    if not step.repeats:
        return (streams + factors @ streams).reshape(x.shape)
    # A library's sums may take their order from the number of rows.
    products = [factors[:, :, j, None] * streams[:, j, None] for j in range(n)]
    return reduce(torch.add, products, streams).reshape(x.shape)


@_form(AddToStreams)
def _add_to_streams(op: AddToStreams, step: TorchStep) -> Tensor:
    x = step.values[op.x]
    factors = constant(op.offsets, x.dtype, x.device)
    if op.coefficients is not None:
        factors = factors + step.values[op.coefficients]
    added = factors.expand(len(x), -1)[:, :, None] * step.values[op.y][:, None]
    return x + added.reshape(x.shape)


@_form(MatchMagnitude)
def _match_magnitude(op: MatchMagnitude, step: TorchStep) -> Tensor:
    x, target = wide(step.values[op.x]), wide(step.values[op.target])
    streams = x.reshape(len(x), -1, target.shape[1])
    own = step.mean(streams.square()).clamp(min=op.floor)
    wanted = step.mean(target.square())[:, None]
    return (streams * wanted.sqrt() / own.sqrt()).reshape(x.shape).to(step.values[op.x].dtype)


@_form(ScaleColumns)
def _scale_columns(op: ScaleColumns, step: TorchStep) -> Tensor:
    x = step.values[op.x]
    return torch.mul(x, step.weight(op.weight).to(x.dtype), out=step.out)


@_form(Sparsify)
def _sparsify(op: Sparsify, step: TorchStep) -> Tensor:
    x = wide(step.values[op.x])
    centre = step.mean(x)
    spread = step.mean((x - centre).square()).sqrt()
    return functional.relu(x - (centre + op.deviations * spread)).to(step.values[op.x].dtype)


@_form(Rope)
def _rope(op: Rope, step: TorchStep) -> Tensor:
    return step.rotated(step.values[op.x], op.head_dim, op.rope, op.x.rows)


@_form(Attention)
def _attention(op: Attention, step: TorchStep) -> Tensor:
    k, v = (None if x is None else step.values[x] for x in (op.k, op.v))
    sinks = None if op.sinks is None else step.weight(op.sinks)
    return step.attend(step.values[op.q], k, v, op.params, sinks, step.out)


@_form(FusedAttention)
def _fused_attention(op: FusedAttention, step: TorchStep) -> Tensor:
    p, qkv = op.params, step.values[op.qkv]
    sinks = None if op.sinks is None else step.weight(op.sinks)
    if (queries := step.prepared_queries(op, qkv)) is not None:
        return step.attend(queries, None, None, p, sinks, step.out)

    def ready(x: Tensor, is_normed: bool, weight: Parameter | None) -> Tensor:
        if is_normed:
            x = step.normed(x, None if weight is None else step.weight(weight), p.head_dim, op.eps)
        return x if op.rope is None else rotate(x, p.head_dim, step.rotation(op.rope, x.dtype))

    if not op.owns_cache:
        return step.attend(ready(qkv, op.norms_q, op.q_norm), None, None, p, sinks, step.out)
    q, k, v = torch.split(qkv, [*p.widths], dim=-1)
    q, k = ready(q, op.norms_q, op.q_norm), ready(k, op.norms_k, op.k_norm)
    if op.norms_v:
        v = step.normed(v, None, p.cache.value_dim, op.eps)
    return step.attend(q, k, v, p, sinks, step.out)


@_form(LatentAttention)
def _latent_attention(op: LatentAttention, step: TorchStep) -> Tensor:
    heads = op.params.num_heads
    q, q_rope = (step.values[x].reshape(-1, heads, x.cols // heads) for x in (op.q, op.q_rope))
    latent, dim = step.values[op.latent], op.params.head_dim
    key = torch.cat([latent, step.values[op.k_rope]], dim=1, out=step.find((len(latent), dim), latent.dtype))
    q = torch.cat([q, q_rope], dim=2, out=step.find((len(latent), heads, dim), latent.dtype)).flatten(1)
    return step.attend(q, key, key[:, :0], op.params, None, step.out)


@_form(EncoderAttention)
def _encoder_attention(op: EncoderAttention, step: TorchStep) -> Tensor:
    q, k, v = (step.values[x] for x in (op.q, op.k, op.v))
    spans = step.spans_of(op.q.rows)
    return torch.cat([attend_all(q[rows], k[rows], v[rows], op.params) for rows in spans], out=step.out)


@_form(CrossAttention)
def _cross_attention(op: CrossAttention, step: TorchStep) -> Tensor:
    return step.attend_across(op)


@_form(MeanPool)
def _mean_pool(op: MeanPool, step: TorchStep) -> Tensor:
    x, rows = wide(step.values[op.x]), step.rows
    if step.repeats:
        of_texts = torch.stack([x[span].mean(dim=0) for span in rows.spans])
        return of_texts[rows.sequences[rows.wanted]].to(step.values[op.x].dtype)
    # A product with a matrix of zeros and ones: unlike additions by index, it has one order on every device.
    members = functional.one_hot(rows.sequences, len(rows.starts) - 1).to(x.dtype)
    means = (members.T @ x) / members.sum(dim=0)[:, None]
    return means[rows.sequences[rows.wanted]].to(step.values[op.x].dtype)


@_form(MoE)
def _moe(op: MoE, step: TorchStep) -> Tensor:
    x = step.values[op.x]
    router_x = x if op.router_x is None else step.values[op.router_x]
    logits = step.linear(router_x, (op.router,), (op.router_bias,))
    bias, factors = (None if p is None else step.weight(p) for p in (op.selection_bias, op.expert_scale))
    chosen, weights = choose_experts(op.routing, wide(logits), bias)
    weights = weights if factors is None else weights * wide(factors)[chosen]
    chosen = chosen - op.first_expert  # those of other ranks become numbers that no expert here has
    if (mixed := step.experts(op, x, (chosen, weights))) is not None:
        return mixed
    weights = weights.to(x.dtype)
    out = torch.zeros_like(x)
    for expert in range(op.gate.shape[0]):
        if step.avoids_host:  # all rows, those of others with weight zero
            weight = torch.where(chosen == expert, weights, 0.0)
            is_chosen = (chosen == expert).any(dim=1, keepdim=True)
            y = _expert(op, step, x, weight.sum(dim=1, keepdim=True), expert)
            out = out + torch.where(is_chosen, y, 0.0)
            continue
        rows, place = torch.nonzero(chosen == expert, as_tuple=True)
        if len(rows):
            y = _expert(op, step, x[rows], weights[rows, place, None], expert)
            out = out.index_add(0, rows, y.to(out.dtype))  # under autocast a product is narrower
    return out


def _expert(op: MoE, step: TorchStep, x: Tensor, weight: Tensor, expert: int) -> Tensor:
    """The share of one expert in the output of the rows x that have chosen it with these weights."""

    def product(x: Tensor, matrix: Parameter, bias: Parameter | None) -> Tensor:
        y = step.product(x, matrix, expert)
        return y if bias is None else y + step.weight(bias)[expert].to(y.dtype)

    if op.routing.on_input:
        x = x * weight
    gate, up = product(x, op.gate, op.gate_bias), product(x, op.up, op.up_bias)
    if op.limit is not None:
        gate, up = gate.clamp(max=op.limit), up.clamp(-op.limit, op.limit)
    y = product(ACTIVATIONS[op.kind](gate) * (up + op.up_offset), op.down, op.down_bias)
    return y if op.routing.on_input else weight * y


def choose_experts(routing: Routing, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `octavo.graph.ops.Routing.choose`: experts and weights, both [rows, top_k]."""
    scores = torch.softmax(logits, dim=-1) if routing.scoring == "softmax" else torch.sigmoid(logits)
    rank = scores if bias is None else scores + bias
    if routing.num_groups > 1:
        groups = rank.reshape(len(rank), routing.num_groups, -1)
        best = groups.sort(dim=-1).values[..., -routing.group_best :].sum(dim=-1)
        kept = torch.argsort(-best, dim=-1, stable=True)[:, : routing.top_groups]
        is_kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, kept, True)
        rank = groups.masked_fill(~is_kept[..., None], -torch.inf).reshape(rank.shape)
    chosen = torch.argsort(-rank, dim=-1, stable=True)[:, : routing.top_k]
    weights = scores.gather(1, chosen)
    if routing.normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return chosen, weights * routing.scale


@_form(AllReduce)
def _all_reduce(op: AllReduce, step: TorchStep) -> Tensor:
    return step.values[op.x] if op.size == 1 else step.sum_over_ranks(op)


@_form(AllGather)
def _all_gather(op: AllGather, step: TorchStep) -> Tensor:
    return step.values[op.x] if op.size == 1 else step.side_by_side_of_ranks(op)


@_form(ShortConv)
def _short_conv(op: ShortConv, step: TorchStep) -> Tensor:
    if (advanced := step.advanced(op)) is not None:
        return advanced
    bias = None if op.bias is None else step.weight(op.bias)
    taps = step.weight(op.weight).reshape(op.x.cols, op.taps)
    out = short_conv(step, op.cache, step.values[op.x], taps)
    out = out if bias is None else out + bias.to(out.dtype)
    return out if op.kind is None else ACTIVATIONS[op.kind](out)


@_form(GatedDeltaRule)
def _gated_delta_rule(op: GatedDeltaRule, step: TorchStep) -> Tensor:
    if (advanced := step.advanced(op)) is not None:
        return advanced
    h, x = op.heads, step.values[op.qkv]
    width, heads = h.num_k_heads * h.key_dim, torch.arange(h.num_v_heads, device=x.device)
    key_of = heads % h.num_k_heads if h.is_tiled else heads // (h.num_v_heads // h.num_k_heads)

    def unit(part: Tensor) -> Tensor:
        y = wide(part).reshape(-1, h.num_k_heads, h.key_dim)
        return (y * torch.rsqrt(y.square().sum(dim=-1, keepdim=True) + op.eps))[:, key_of]

    q, k = unit(x[:, :width]) / math.sqrt(h.key_dim), unit(x[:, width : 2 * width])
    v = wide(x[:, 2 * width :]).reshape(-1, h.num_v_heads, h.value_dim)
    alpha = wide(step.values[op.alpha]) + step.weight(op.dt_bias)
    gates = torch.exp(step.weight(op.decay) * functional.softplus(alpha, threshold=60.0))
    amounts = torch.sigmoid(wide(step.values[op.beta]))
    return delta_rule(step, op.cache, (q, k, v, gates, amounts)).to(x.dtype)


@_form(SelectiveScan)
def _selective_scan(op: SelectiveScan, step: TorchStep) -> Tensor:
    if (advanced := step.advanced(op)) is not None:
        return advanced
    h, xbc = op.heads, step.values[op.xbc]
    cols, width = h.num_heads * h.head_dim, h.num_groups * h.state_dim
    x, b, c = torch.split(wide(xbc), [cols, width, width], dim=1)
    x = x.reshape(-1, h.num_heads, h.head_dim)
    share = h.num_heads // h.num_groups
    b, c = (y.reshape(-1, h.num_groups, h.state_dim).repeat_interleave(share, dim=1) for y in (b, c))
    steps = functional.softplus(wide(step.values[op.dt]) + step.weight(op.dt_bias), threshold=60.0)
    gates = torch.exp(step.weight(op.decay) * steps)
    scanned = selective_scan(step, op.cache, (steps[..., None] * x, b, c, gates))
    return (scanned + (step.weight(op.skip)[:, None] * x).flatten(1)).to(xbc.dtype)
