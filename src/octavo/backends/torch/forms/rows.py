"""Operations on rows in torch: look-up, gathering, pooling, and exchange between ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from octavo.backends.torch.forms.register import form
from octavo.backends.torch.plain import wide
from octavo.backends.torch.step import TorchStep
from octavo.graph.ops.collective import AllGather, AllReduce
from octavo.graph.ops.encoder import MaxPool, MeanPool, TokenTypeEmbedding
from octavo.graph.ops.linear import Embedding, Input, PositionEmbedding
from octavo.graph.ops.rows import AddRows, Gather, PoolRows, Splice
from octavo.graph.ops.stages import Receive, Send


@form(Send)
def _send(op: Send, step: TorchStep) -> Tensor:
    return step.values[op.x]


@form(Receive)
@form(Input)
def _input(op: Input, step: TorchStep) -> Tensor:
    return step.inputs[op.slot]  # `evaluate` copies it, converted to the type of values


@form(Embedding)
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


@form(PositionEmbedding)
def _position_embedding(op: PositionEmbedding, step: TorchStep) -> Tensor:
    positions = step.rows.positions + op.offset if op.offset else step.rows.positions
    return step.embed(positions, op.weight, step.out)


@form(TokenTypeEmbedding)
def _token_type_embedding(op: TokenTypeEmbedding, step: TorchStep) -> Tensor:
    types = step.rows.token_types
    return step.embed(torch.zeros_like(step.rows.token_ids) if types is None else types, op.weight, step.out)


@form(Gather)
def _gather(op: Gather, step: TorchStep) -> Tensor:
    index = step.index_of(op.index)
    assert index is not None
    if op.width == 1:
        return torch.index_select(step.values[op.x], 0, index, out=step.out)
    return step.values[op.x][index].reshape(-1, op.width * op.x.cols)


def _with_given(op: Splice | AddRows, step: TorchStep, change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return x with `change(x, given)` for the rows that the index selects."""
    x, index = step.values[op.x], step.index_of(op.index)
    if index is None or not step.count_of(op.given.rows):
        return x
    given = step.values[op.given][index.clamp(min=0)].to(x.dtype)
    return torch.where((index >= 0)[:, None], change(x, given), x)


@form(Splice)
def _splice(op: Splice, step: TorchStep) -> Tensor:
    return _with_given(op, step, lambda _, given: given)


@form(AddRows)
def _add_rows(op: AddRows, step: TorchStep) -> Tensor:
    return _with_given(op, step, torch.add)


@form(PoolRows)
def _pool_rows(op: PoolRows, step: TorchStep) -> Tensor:
    x, index = step.values[op.x], step.index_of(op.index)
    assert index is not None
    return wide(x[index].reshape(-1, op.width, op.x.cols)).mean(dim=1).to(x.dtype)


@form(MeanPool)
def _mean_pool(op: MeanPool, step: TorchStep) -> Tensor:
    x, rows = wide(step.values[op.x]), step.rows
    if step.repeats:
        of_texts = torch.stack([x[span].mean(dim=0) for span in rows.spans])
        return of_texts[rows.sequences[rows.wanted]].to(step.values[op.x].dtype)
    # A product with a matrix of zeros and ones. Unlike `index_add`, it has a fixed order on every device.
    members = functional.one_hot(rows.sequences, len(rows.starts) - 1).to(x.dtype)
    means = (members.T @ x) / members.sum(dim=0)[:, None]
    return means[rows.sequences[rows.wanted]].to(step.values[op.x].dtype)


@form(MaxPool)
def _max_pool(op: MaxPool, step: TorchStep) -> Tensor:
    x, rows = step.values[op.x], step.rows
    if step.repeats:
        largest = torch.stack([x[span].amax(dim=0) for span in rows.spans])
    else:
        texts = rows.sequences[:, None].expand(-1, x.shape[1])
        largest = x.new_zeros((len(rows.starts) - 1, x.shape[1])).scatter_reduce(
            0, texts, x, "amax", include_self=False
        )
    return largest[rows.sequences[rows.wanted]]


@form(AllReduce)
def _all_reduce(op: AllReduce, step: TorchStep) -> Tensor:
    return step.values[op.x] if op.size == 1 else step.sum_over_ranks(op)


@form(AllGather)
def _all_gather(op: AllGather, step: TorchStep) -> Tensor:
    return step.values[op.x] if op.size == 1 else step.side_by_side_of_ranks(op)
