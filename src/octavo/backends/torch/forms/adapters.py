"""Low-rank products of adapters in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.backends.torch.adapters import RareChange
from octavo.backends.torch.forms.register import form
from octavo.backends.torch.plain import ACTIVATIONS, rms_norm, softcap, wide
from octavo.backends.torch.step import TorchStep
from octavo.graph.ops.low_rank import AdapterSlots, AddLowRank, AddToEmbedding


@form(AdapterSlots)
def _adapter_slots(op: AdapterSlots, step: TorchStep) -> Tensor:
    index = step.index_of(op.index)
    if index is None:
        return torch.full((len(step.rows.token_ids), 1), -1.0, device=step.rows.token_ids.device)
    return index[:, None].float()


@form(AddLowRank)
def _add_low_rank(op: AddLowRank, step: TorchStep) -> Tensor:
    y = step.values[op.y]
    x, slots = step.values[op.x][: len(y)], step.values[op.slots][: len(y)]
    if op.norm is not None:
        x = rms_norm(x, step.weight(op.norm), x.shape[-1], op.eps)
    out = wide(y) + wide(step.low_rank(op, x, slots))
    for slot, changes in step.rare_changes(op).items():
        rows = torch.nonzero(slots[:, 0] == slot)[:, 0]
        for change in changes if len(rows) else ():
            begin = sum(map(op.columns, op.weights[: change.number]))
            columns = slice(begin, begin + op.columns(op.weights[change.number]))
            out[rows, columns] += wide(_change(op, change, x[rows], step))
    if op.kind is not None:
        gate, up = out.chunk(2, dim=1)
        out = ACTIVATIONS[op.kind](gate) * up
    out = out if op.scale == 1.0 else out * op.scale
    return (out if op.softcap is None else softcap(out, op.softcap)).to(y.dtype)


def _change(op: AddLowRank, change: RareChange, x: Tensor, step: TorchStep) -> Tensor:
    """Return what a rare change adds to W x and the low-rank product of rows with the same adapter."""
    found = torch.zeros((), dtype=torch.float32, device=x.device)
    weight = op.weights[change.number]
    if change.gain is not None:
        if op.heads == 1:
            plain = step.linear(x, (weight,), (None,))
        else:
            plain = step.stacked_product(x.reshape(len(x), op.heads, -1), weight).reshape(len(x), -1)
        found = (change.gain - 1) * wide(plain)
    return found if change.b is None else found + wide(x.to(change.b.dtype) @ change.b.T)


@form(AddToEmbedding)
def _add_to_embedding(op: AddToEmbedding, step: TorchStep) -> Tensor:
    out, slots, ids = step.values[op.y], step.values[op.slots][:, 0], step.rows.token_ids
    count = op.weights[0].shape[0]
    if not op.has_all:
        ids = torch.where(ids < (op.total or count), ids, 0)
    ids = ids - op.first
    for slot, changes in step.rare_changes(op).items():
        rows = torch.nonzero((slots == slot) & (ids >= 0) & (ids < count))[:, 0]
        for change in changes:
            assert change.b is not None, "a change of an embedding has factors"
            added = change.b.T[ids[rows]] if change.a is None else change.a.T[ids[rows]] @ change.b.T
            own = out[rows] if change.gain is None else out[rows] * change.gain
            out = out.index_put((rows,), (wide(own) + wide(added)).to(out.dtype))
    return out
