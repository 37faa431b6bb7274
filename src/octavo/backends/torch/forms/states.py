"""Operations with states, in torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from octavo.backends.torch.forms.register import form
from octavo.backends.torch.plain import ACTIVATIONS, wide
from octavo.backends.torch.recurrence import (
    channel_scan,
    delta_rule,
    diagonal_delta_rule,
    gated_sum,
    selective_scan,
    short_conv,
)
from octavo.backends.torch.step import TorchStep
from octavo.graph.ops.recurrence import (
    ChannelScan,
    DiagonalDeltaRule,
    GatedDeltaRule,
    RealGatedRecurrence,
    SelectiveScan,
    ShortConv,
)


@form(ShortConv)
def _short_conv(op: ShortConv, step: TorchStep) -> Tensor:
    if (advanced := step.advanced(op)) is not None:
        return advanced
    bias = None if op.bias is None else step.weight(op.bias)
    taps = step.weight(op.weight).reshape(op.x.cols, op.taps)
    out = short_conv(step, op.cache, step.values[op.x], taps)
    out = out if bias is None else out + bias.to(out.dtype)
    return out if op.kind is None else ACTIVATIONS[op.kind](out)


@form(GatedDeltaRule)
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


@form(SelectiveScan)
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


@form(ChannelScan)
def _channel_scan(op: ChannelScan, step: TorchStep) -> Tensor:
    x, dt, b, c = (wide(step.values[value]) for value in (op.x, op.dt, op.b, op.c))
    steps = functional.softplus(dt, threshold=60.0)
    decay = step.weight(op.decay).reshape(op.b.cols, op.x.cols)
    scanned = channel_scan(step, op.cache, (steps * x, b, c, steps), decay)
    return (scanned + step.weight(op.skip) * x).to(step.values[op.x].dtype)


@form(DiagonalDeltaRule)
def _diagonal_delta_rule(op: DiagonalDeltaRule, step: TorchStep) -> Tensor:
    values = (op.q, op.k, op.read, op.erase, op.gate)
    q, k, read, erase, gate = (wide(step.values[x]).reshape(-1, op.num_heads, op.key_dim) for x in values)
    v = wide(step.values[op.v]).reshape(-1, op.num_heads, op.value_dim)
    if op.decay is not None:
        gate = step.weight(op.decay)[:, None] * functional.softplus(gate, threshold=60.0)
    amounts = torch.ones_like(v[..., 0]) if op.beta is None else torch.sigmoid(wide(step.values[op.beta]))
    tokens = (q, k, v, read, erase, torch.exp(gate), amounts)
    return diagonal_delta_rule(step, op.cache, tokens, op.reads_decayed).to(step.values[op.v].dtype)


@form(RealGatedRecurrence)
def _real_gated_recurrence(op: RealGatedRecurrence, step: TorchStep) -> Tensor:
    x, input_gate, decay_gate = (wide(step.values[value]) for value in (op.x, op.input_gate, op.decay_gate))
    rates = -op.sharpness * step.weight(op.slope) * torch.sigmoid(decay_gate + step.weight(op.decay_bias))
    is_first = (step.rows.positions == 0)[:, None]
    sizes = torch.where(is_first, 1.0, torch.sqrt(-torch.expm1(2 * rates)))
    added = sizes * x * torch.sigmoid(input_gate + step.weight(op.input_bias))
    return gated_sum(step, op.cache, (added, torch.exp(rates))).to(step.values[op.x].dtype)
