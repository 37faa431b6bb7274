"""Execution of any graph in plain differentiable torch, on whole texts and without a paged cache, on any device.

The backend's kernels are checked against it, and training runs through it:

    source = dequantized(weights)
    logits = logits_of(graph, overlaid(source, {"layers.0.mlp.up_proj.weight": trained}), Texts.of([[1, 2, 3]]))
    logits.square().mean().backward()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from octavo.backends.parameters import weight_of
from octavo.backends.torch.attention import Queries, attend, scaled_queries
from octavo.backends.torch.operations import evaluate
from octavo.backends.torch.step import HeadTables, StepRows, TorchStep
from octavo.errors import GraphError, UsageError
from octavo.graph.builder import Graph
from octavo.graph.cache import StateCache
from octavo.graph.ops.attention import AttentionParams
from octavo.graph.values import Parameter
from octavo.quantization.packed import Weight

WeightSource = Callable[[Parameter], Tensor]
"""Returns the numbers of a parameter in its shape, with or without gradient."""
Product = Callable[[Tensor, Parameter], Tensor]
"""Multiplies rows [rows, in] by the transpose of a matrix [out, in]; the result has the type of the rows."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Whole texts, one after another, with T tokens in total.

    rows: [R], the tokens whose output rows are wanted; None means all.
    token_types: [T]; None means all 0.
    """

    token_ids: Tensor  # [T], int64
    lengths: tuple[int, ...]
    rows: Tensor | None = None
    token_types: Tensor | None = None

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Texts:
        """Create texts from token ids. Raises UsageError for an empty text."""
        if not texts or not all(texts):
            raise UsageError("a text without tokens cannot be evaluated")
        ids = [token for text in texts for token in text]
        return cls(torch.tensor(ids, dtype=torch.int64, device=device), tuple(map(len, texts)))


def dequantized(
    weights: Mapping[str, Weight],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    keep: bool = True,
) -> WeightSource:
    """Return a checkpoint's weights as dense tensors without gradient, each built on first access.

    keep: False means that they are rebuilt on every access, for models whose dense weights do not fit in memory.
    """
    kept: dict[Parameter, Tensor] = {}

    def source(parameter: Parameter) -> Tensor:
        if parameter in kept:
            return kept[parameter]
        values = weight_of(weights, parameter).dequantize()
        tensor = torch.tensor(values, dtype=dtype, device=device)
        if keep:
            kept[parameter] = tensor
        return tensor

    return source


def overlaid(source: WeightSource, given: Mapping[str, Tensor]) -> WeightSource:
    """Return `source` with the given tensors, such as trained ones, replacing the weights of the same names.

    A tensor has the shape of the whole weight; a parameter that is a part of the weight uses that part of the tensor.
    """

    def chosen(parameter: Parameter) -> Tensor:
        tensor = given.get(parameter.name)
        if tensor is None:
            return source(parameter)
        if parameter.part is not None:
            part = parameter.part
            pieces = [tensor.narrow(part.dimension, begin, end - begin) for begin, end in part.ranges]
            tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, part.dimension)
        if tuple(tensor.shape) != parameter.shape:
            raise GraphError(
                f"tensor {parameter.label} has shape {list(tensor.shape)}, the graph uses it as {list(parameter.shape)}"
            )
        return tensor

    return chosen


def logits_of(graph: Graph, source: WeightSource, texts: Texts, product: Product | None = None) -> Tensor:
    """Return the logits [rows, vocab] of a whole model, for all tokens or for `Texts.rows`, in at least float32."""
    if not graph.makes_logits:
        raise UsageError("a segment of a graph produces no logits; use `outputs_of`")
    return outputs_of(graph, source, texts, product=product)[0]


def outputs_of(
    graph: Graph,
    source: WeightSource,
    texts: Texts,
    inputs: Sequence[Tensor] = (),
    product: Product | None = None,
) -> tuple[Tensor, ...]:
    """Return the outputs of a graph or of a segment, whose `inputs` are the outputs of the previous segment.

    Gradients flow to the inputs and to the weights that require them.
    product: computes products with whole matrices, except stacks of experts; None means plain products with the numbers
    of `source`.
    """
    if len(inputs) != len(graph.inputs):
        raise UsageError(f"the graph takes {len(graph.inputs)} inputs, but {len(inputs)} are given")
    step = EagerStep(_rows(texts), inputs, source=source, given_product=product)
    last_use = {value: index for index, node in enumerate(graph.nodes) for value in node.op.inputs}
    last_use.update(dict.fromkeys(graph.outputs, len(graph.nodes)))
    for index, node in enumerate(graph.nodes):
        evaluate(node, step)
        for value in node.op.inputs:  # autograd keeps what gradients need
            if last_use[value] == index:
                step.values.pop(value, None)
    return tuple(step.values[value] for value in graph.outputs)


@dataclass(slots=True)
class EagerStep(TorchStep):
    """A step over whole texts: each text sees only itself, from its first token on."""

    source: WeightSource = field(kw_only=True)
    given_product: Product | None = None
    keys_and_values: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by layer

    def weight(self, parameter: Parameter) -> Tensor:
        return self.source(parameter)

    def product(self, x: Tensor, parameter: Parameter, index: int | None = None) -> Tensor:
        if index is not None or self.given_product is None:
            return super(EagerStep, self).product(x, parameter, index)
        return self.given_product(x, parameter)

    def attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        p: AttentionParams,
        tables: HeadTables,
        out: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        if k is not None and v is not None:
            keys = k.reshape(len(k), p.num_kv_heads, -1)
            values = v.reshape(len(v), p.num_kv_heads, -1) if v.shape[1] else keys[..., : p.cache.value_dim]
            self.keys_and_values[p.layer] = keys, values
        keys, values = self.keys_and_values[p.layer]
        positions, q = self.rows.positions, scaled_queries(q, p, self.rows.positions)
        heads = q.reshape(len(q), p.num_heads, p.head_dim)
        mixed = []
        for rows, end in zip(
            self.rows.spans, (self.rows.first_rows[1:] - self.rows.first_rows[:-1])[:, None], strict=True
        ):
            first = positions[rows][:1]
            text = Queries(heads[None, rows], keys[None, rows], values[None, rows], positions[None, rows], first, end)
            mixed.append(attend(text, p, tables)[0].flatten(1))
        return torch.cat(mixed)

    def read_states(self, cache: StateCache) -> list[Tensor]:
        count, like = len(self.rows.starts) - 1, next(iter(self.values.values()))
        return [torch.zeros(count, *shape, dtype=like.dtype, device=like.device) for shape in cache.shapes]

    def write_states(self, cache: StateCache, after: Tensor, saved: Sequence[Tensor]) -> None:
        """Discard the states, because nothing comes after a whole text."""


def _rows(texts: Texts) -> StepRows:
    ids = texts.token_ids
    starts = (0, *accumulate(texts.lengths))
    if starts[-1] != len(ids):
        raise UsageError(f"texts of {starts[-1]} tokens in total, but {len(ids)} token ids")
    first_rows = torch.tensor(starts, device=ids.device)
    lengths = first_rows[1:] - first_rows[:-1]
    sequences = torch.repeat_interleave(torch.arange(len(lengths), device=ids.device), lengths)
    every = torch.arange(len(ids), device=ids.device)
    wanted = every if texts.rows is None else texts.rows
    return StepRows(ids, every - first_rows[sequences], sequences, wanted, first_rows, starts, texts.token_types)
