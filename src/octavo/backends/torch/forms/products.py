"""Matrix products and mixtures of experts in torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import torch
from torch import Tensor

from octavo.backends.torch.adapters import RareChange, rows_by_slot
from octavo.backends.torch.coded import CodedRows
from octavo.backends.torch.forms.register import form
from octavo.backends.torch.plain import ACTIVATIONS, softcap, wide
from octavo.backends.torch.step import TorchStep
from octavo.graph.ops.adapted_moe import AdaptedMoE
from octavo.graph.ops.latent_attention import HeadLinear
from octavo.graph.ops.linear import FusedLinear, Linear, Logits
from octavo.graph.ops.moe import MoE, Routing
from octavo.graph.values import Parameter


@form(Linear)
def _plain_linear(op: Linear, step: TorchStep) -> Tensor:
    return step.linear(step.rows_of(op.x), (op.weight,), (op.bias,), out=step.out)


@form(HeadLinear)
def _head_linear(op: HeadLinear, step: TorchStep) -> Tensor:
    heads, out_features, in_features = op.weight.shape
    x = step.values[op.x].reshape(-1, heads, in_features)
    return step.stacked_product(x, op.weight).reshape(-1, heads * out_features)


@form(Logits)
def _logits(op: Logits, step: TorchStep) -> Tensor:
    x, out = step.values[op.x], step.out
    dtype = torch.promote_types(x.dtype, torch.float32)
    logits = step.linear(x, (op.weight,), (op.bias,), dtype=dtype, out=out)
    logits = logits if op.scale == 1.0 else torch.mul(logits, op.scale, out=out)
    return logits if op.softcap is None else softcap(logits, op.softcap, out)


@form(FusedLinear)
def _fused_linear(op: FusedLinear, step: TorchStep) -> Tensor | CodedRows:
    x = step.rows_of(op.x)
    if op.norm is not None:
        x = step.normed_for(step.values[op.x], op.norm, op.eps, op.weights)
    residual = None if op.residual is None else step.values[op.residual]
    if op.kind is None:
        return step.linear(x, op.weights, op.biases, residual, out=step.out)
    if residual is None:
        return step.gate_product(x, op, step.out)
    # The output may use the residual's memory.
    found = step.gate_product(x, op, step.find((len(x), op.weights[0].shape[0]), x.dtype))
    assert isinstance(found, Tensor), "a product takes no codes of a sum"
    return torch.add(found, residual, out=step.out)


Changes = Mapping[Parameter, RareChange]
"""An adapter's changes to a mixture, by weight."""


@form(MoE)
def _moe(op: MoE, step: TorchStep) -> Tensor:
    x = step.values[op.x]
    return _mixture(op, step, x, x if op.router_x is None else step.values[op.router_x], {})


@form(AdaptedMoE)
def _adapted_moe(op: AdaptedMoE, step: TorchStep) -> Tensor:
    x = step.values[op.x]
    router_x = x if op.router_x is None else step.values[op.router_x]
    changes = step.rare_changes(op)
    found = rows_by_slot(step.values[op.slots]) if changes else []
    groups = [(rows, changes[slot]) for slot, rows in found if slot in changes]
    if not groups:
        return _mixture(op, step, x, router_x, {})
    out, is_left = torch.zeros_like(x), torch.ones(len(x), dtype=torch.bool, device=x.device)
    for rows, group in groups:
        is_left[rows] = False
        own = {op.weights[change.number]: change for change in group}
        out = out.index_put((rows,), _mixture(op, step, x[rows], router_x[rows], own).to(out.dtype))
    rows = torch.nonzero(is_left)[:, 0]
    if not len(rows):
        return out
    return out.index_put((rows,), _mixture(op, step, x[rows], router_x[rows], {}).to(out.dtype))


def _mixture(op: MoE, step: TorchStep, x: Tensor, router_x: Tensor, changes: Changes) -> Tensor:
    """Return the output for rows x that all use the same adapter.

    changes: the adapter's changes.
    """
    if op.router not in changes:
        logits = step.linear(router_x, (op.router,), (op.router_bias,))
    else:
        logits = _changed(step.product(router_x, op.router), router_x, changes[op.router])
        logits = logits if op.router_bias is None else logits + step.weight(op.router_bias).to(logits.dtype)
    bias, factors = (None if p is None else step.weight(p) for p in (op.selection_bias, op.expert_scale))
    chosen, weights = choose_experts(op.routing, wide(logits), bias)
    weights = weights if factors is None else weights * wide(factors)[chosen]
    # Identities and other ranks' experts get numbers that no expert here has.
    here = chosen - op.first_expert, weights
    mixed = None if changes else step.experts(op, x, here)
    out = _sum_of_experts(op, step, x, here, changes) if mixed is None else mixed
    if not (op.routing.num_identities and op.adds_identities):
        return out
    shares = torch.where(chosen < op.num_experts, 0.0, weights)
    # The order of a library's sum may depend on the number of rows.
    share = reduce(torch.add, shares.unbind(1)) if step.repeats else shares.sum(dim=1)
    return out + x * share[:, None].to(x.dtype)


def _sum_of_experts(op: MoE, step: TorchStep, x: Tensor, choice: tuple[Tensor, Tensor], changes: Changes) -> Tensor:
    """Compute what `TorchStep.experts` does, one expert after another."""
    chosen, weights = choice[0], choice[1].to(x.dtype)
    out = torch.zeros_like(x)
    for expert in range(op.gate.shape[0]):
        if step.avoids_host:  # all rows; those that did not choose this expert weigh zero
            weight = torch.where(chosen == expert, weights, 0.0)
            is_chosen = (chosen == expert).any(dim=1, keepdim=True)
            y = _expert(op, step, x, weight.sum(dim=1, keepdim=True), expert, changes)
            out = out + torch.where(is_chosen, y, 0.0)
            continue
        rows, place = torch.nonzero(chosen == expert, as_tuple=True)
        if len(rows):
            y = _expert(op, step, x[rows], weights[rows, place, None], expert, changes)
            out = out.index_add(0, rows, y.to(out.dtype))  # autocast makes products narrower
    return out


def _changed(y: Tensor, x: Tensor, change: RareChange, expert: int | None = None) -> Tensor:
    """Apply an adapter's change to y = W x, where W is a weight or one expert's weight."""
    found = (change.gain, change.a, change.b)
    gain, a, b = found if expert is None else (None if each is None else each[expert] for each in found)
    assert a is not None, "experts have factors"
    assert b is not None, "experts have factors"
    added = wide(x.to(a.dtype) @ a.T @ b.T)
    return (added + (wide(y) if gain is None else wide(y) * gain)).to(y.dtype)


def _expert(op: MoE, step: TorchStep, x: Tensor, weight: Tensor, expert: int, changes: Changes) -> Tensor:
    """Return one expert's contribution to the output of the rows x that have chosen it with these weights."""

    def product(x: Tensor, matrix: Parameter, bias: Parameter | None) -> Tensor:
        y = step.product(x, matrix, expert)
        if matrix in changes:
            y = _changed(y, x, changes[matrix], expert)
        return y if bias is None else y + step.weight(bias)[expert].to(y.dtype)

    if op.routing.on_input:
        x = x * weight
    gate, up = product(x, op.gate, op.gate_bias), product(x, op.up, op.up_bias)
    before, after = (None, op.limit) if op.limits_activated else (op.limit, None)
    gate = ACTIVATIONS[op.kind](gate if before is None else gate.clamp(max=before))
    gate = gate if after is None else gate.clamp(max=after)
    up = up if op.limit is None else up.clamp(-op.limit, op.limit)
    y = product(gate * (up + op.up_offset), op.down, op.down_bias)
    return y if op.routing.on_input else weight * y


def _mix_sparsely(routing: Routing, logits: Tensor) -> tuple[Tensor, Tensor]:
    left, chosen, weights = logits, [], []
    for _ in range(routing.top_k):
        best, index = left.max(dim=-1, keepdim=True)
        is_far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * routing.jitter
        weights.append(1.0 / (left - best).exp().masked_fill(is_far, 0.0).sum(dim=-1, keepdim=True))
        chosen.append(index)
        left = left.scatter(-1, index, -torch.inf)
    return torch.cat(chosen, dim=-1), torch.cat(weights, dim=-1)


def choose_experts(routing: Routing, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `octavo.graph.ops.Routing.choose`. Returns experts and weights, both [rows, top_k]."""
    if routing.scoring == "sparsemixer":
        return _mix_sparsely(routing, logits)
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
