"""Elementwise operations, norms, and streams of hidden states, in torch."""

from __future__ import annotations

import math
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from octavo.backends.torch.coded import CodedRows
from octavo.backends.torch.forms.register import form
from octavo.backends.torch.plain import softcap, wide
from octavo.backends.torch.step import TorchStep, constant
from octavo.graph.ops.rowwise import Activation, Add, Clip, GatedActivation, LayerNorm, Mul, RMSNorm, Scale, Softcap
from octavo.graph.ops.spanning_norm import GroupSums, NormColumns, SpanningNorm
from octavo.graph.ops.streams import (
    AddToStreams,
    Columns,
    MatchMagnitude,
    MixStreams,
    ScaleColumns,
    SideBySide,
    Sparsify,
)


@form(Add)
def _add(op: Add, step: TorchStep) -> Tensor:
    return torch.add(step.values[op.a], step.values[op.b], out=step.out)


@form(Mul)
def _mul(op: Mul, step: TorchStep) -> Tensor:
    a, b, out = step.values[op.a], step.values[op.b], step.out
    if op.b.cols in (1, op.a.cols):
        return torch.mul(a, b, out=out)
    groups = len(a), op.b.cols, op.a.cols // op.b.cols
    return torch.mul(a.reshape(groups), b[..., None], out=None if out is None else out.view(groups)).view(a.shape)


@form(Scale)
def _scale(op: Scale, step: TorchStep) -> Tensor:
    return torch.mul(step.values[op.x], op.factor, out=step.out)


@form(Activation)
def _activation(op: Activation, step: TorchStep) -> Tensor:
    return step.activated(step.values[op.x], op.kind, step.out)


@form(GatedActivation)
def _gated_activation(op: GatedActivation, step: TorchStep) -> Tensor | CodedRows:
    return step.gated(step.values[op.gate], step.values[op.up], op, step.out)


@form(Softcap)
def _softcap(op: Softcap, step: TorchStep) -> Tensor:
    return softcap(step.values[op.x], op.cap, step.out)


@form(Clip)
def _clip(op: Clip, step: TorchStep) -> Tensor:
    return torch.clamp(step.values[op.x], op.low, op.high, out=step.out)


@form(RMSNorm)
def _rms_norm(op: RMSNorm, step: TorchStep) -> Tensor:
    weight = None if op.weight is None else step.weight(op.weight)
    return step.normed(step.values[op.x], weight, op.columns, op.eps, step.out)


@form(LayerNorm)
def _layer_norm(op: LayerNorm, step: TorchStep) -> Tensor:
    x, weight = step.values[op.x], step.weight(op.weight)
    bias = None if op.bias is None else step.weight(op.bias)
    if op.columns == op.x.cols:
        return step.layernormed(x, weight, bias, op.eps, step.out)
    groups = wide(x).reshape(x.shape[0], -1, op.columns)
    normed = functional.layer_norm(groups, groups.shape[-1:], None, None, op.eps).flatten(-2) * wide(weight)
    return (normed if bias is None else normed + wide(bias)).to(x.dtype)


class _Groups(NamedTuple):
    """The column groups `first` to `last` that a rank holds at least in part.

    before, after: number of columns in these groups that come before and after the rank's columns.
    """

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
    """Expand one number per group [rows, num_groups] to one number for each column of the rank."""
    found = _Groups.of(span, cols)
    own = of_groups[:, found.first : found.last + 1, None].expand(-1, -1, span.group)
    return own.flatten(1)[:, found.before : found.before + cols]


def _centered(op: GroupSums | SpanningNorm, step: TorchStep) -> Tensor:
    """Return x minus its mean over all ranks, in float32 or wider."""
    x = wide(step.values[op.x])
    return x if op.sums is None else x - _of_columns(step.values[op.sums], op.span, op.x.cols) / op.span.group


@form(GroupSums)
def _group_sums(op: GroupSums, step: TorchStep) -> Tensor:
    # Not `index_add`: on a GPU the order of its additions varies.
    x, found = _centered(op, step), _Groups.of(op.span, op.x.cols)
    whole = functional.pad(x**op.power, (found.before, found.after)).reshape(len(x), -1, op.span.group)
    return functional.pad(step.sums(whole)[..., 0], (found.first, op.span.num_groups - found.last - 1))


@form(SpanningNorm)
def _spanning_norm(op: SpanningNorm, step: TorchStep) -> Tensor:
    squares = _of_columns(step.values[op.squares], op.span, op.x.cols)
    out = _centered(op, step) * torch.rsqrt(squares / op.span.group + op.eps)
    out = out if op.weight is None else out * wide(step.weight(op.weight))
    return (out if op.bias is None else out + wide(step.weight(op.bias))).to(step.values[op.x].dtype)


@form(Columns)
def _columns(op: Columns, step: TorchStep) -> Tensor:
    return step.values[op.x][:, op.begin : op.begin + op.count]


@form(SideBySide)
def _side_by_side(op: SideBySide, step: TorchStep) -> Tensor:
    return torch.cat([step.values[op.a], step.values[op.b]], dim=1, out=step.out)


@form(MixStreams)
def _mix_streams(op: MixStreams, step: TorchStep) -> Tensor:
    x, coefficients = step.values[op.x], step.values[op.coefficients]
    n = math.isqrt(op.coefficients.cols)
    streams, factors = x.reshape(len(x), n, -1), coefficients.reshape(len(x), n, n)
    if not step.repeats:
        return (streams + factors @ streams).reshape(x.shape)
    # The order of a library's sums may depend on the number of rows.
    products = [factors[:, :, j, None] * streams[:, j, None] for j in range(n)]
    return reduce(torch.add, products, streams).reshape(x.shape)


@form(AddToStreams)
def _add_to_streams(op: AddToStreams, step: TorchStep) -> Tensor:
    x = step.values[op.x]
    factors = constant(op.offsets, x.dtype, x.device)
    if op.coefficients is not None:
        factors = factors + step.values[op.coefficients]
    added = factors.expand(len(x), -1)[:, :, None] * step.values[op.y][:, None]
    return x + added.reshape(x.shape)


@form(MatchMagnitude)
def _match_magnitude(op: MatchMagnitude, step: TorchStep) -> Tensor:
    x, target = wide(step.values[op.x]), wide(step.values[op.target])
    streams = x.reshape(len(x), -1, target.shape[1])
    own = step.mean(streams.square()).clamp(min=op.floor)
    wanted = step.mean(target.square())[:, None]
    return (streams * wanted.sqrt() / own.sqrt()).reshape(x.shape).to(step.values[op.x].dtype)


@form(ScaleColumns)
def _scale_columns(op: ScaleColumns, step: TorchStep) -> Tensor:
    x = step.values[op.x]
    return torch.mul(x, step.weight(op.weight).to(x.dtype), out=step.out)


@form(Sparsify)
def _sparsify(op: Sparsify, step: TorchStep) -> Tensor:
    x = wide(step.values[op.x])
    centre = step.mean(x)
    spread = step.mean((x - centre).square()).sqrt()
    return functional.relu(x - (centre + op.deviations * spread)).to(step.values[op.x].dtype)
