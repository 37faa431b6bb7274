"""Low-rank products of adapters in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.backends.torch.forms.register import form
from octavo.backends.torch.plain import ACTIVATIONS, rms_norm, wide
from octavo.backends.torch.step import TorchStep
from octavo.graph.ops.low_rank import AdapterSlots, AddLowRank


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
    if op.kind is not None:
        gate, up = out.chunk(2, dim=1)
        out = ACTIVATIONS[op.kind](gate) * up
    return out.to(y.dtype)
