"""The interface between a step and the torch forms of operations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from octavo.backends.torch.adapters import RareChange
from octavo.backends.torch.coded import CodedRows
from octavo.backends.torch.plain import ACTIVATIONS, rms_norm, rotate, wide
from octavo.errors import GraphError
from octavo.graph.builder import Node
from octavo.graph.cache import StateCache
from octavo.graph.ops.attention import AttentionParams, FusedAttention, RopeParams
from octavo.graph.ops.collective import AllGather, AllReduce
from octavo.graph.ops.encoder import CrossAttention
from octavo.graph.ops.linear import FusedLinear
from octavo.graph.ops.low_rank import AddLowRank, BesideWeights
from octavo.graph.ops.moe import MoE
from octavo.graph.ops.recurrence import GatedDeltaRule, SelectiveScan, ShortConv
from octavo.graph.ops.rowwise import GatedActivation
from octavo.graph.values import LOGITS, OUTPUTS, SELECTED, TOKENS, IndexArray, Parameter, RowDomain, Value


@dataclass(frozen=True, slots=True)
class StepRows:
    """The tokens of a step. T = tokens, N = sequences, R = wanted rows. Tensors are int64 and on the device.

    starts: where the tokens of each sequence start, [N + 1], on the host.
    saves: for each save, the number of tokens of each sequence after which its states are also saved; 0 means that they
    are not saved. The list is empty if no states are saved.
    """

    token_ids: Tensor  # [T], grouped by sequence
    positions: Tensor  # [T], within the sequence
    sequences: Tensor  # [T], the sequence of each token
    wanted: Tensor  # [R], index into the T tokens
    first_rows: Tensor  # [N + 1], `starts` on the device
    starts: tuple[int, ...]
    token_types: Tensor | None = None  # [T]
    saves: tuple[tuple[int, ...], ...] = ()
    save_counts: Tensor | None = None  # [S, N], `saves` on the device

    @property
    def spans(self) -> list[slice]:
        """The tokens of each sequence."""
        return [slice(begin, end) for begin, end in pairwise(self.starts)]


class HeadTables(NamedTuple):
    """Weights with entries for each attention head: `Attention.sinks` and `Attention.distance_bias`."""

    sinks: Tensor | None = None
    distance_bias: Tensor | None = None


NO_TABLES = HeadTables()


@dataclass(frozen=True, slots=True)
class FurtherRows:
    """The rows of a domain in a step, on the device in int64: see `octavo.batch.DomainRows`.

    starts, lengths: on the host.
    tables: block tables of all groups of layers [G, N, blocks], for a domain with caches.
    """

    count: int
    starts: tuple[int, ...] = ()
    positions: Tensor | None = None
    indices: Mapping[str, Tensor] = field(default_factory=dict)
    lengths: tuple[int, ...] = ()
    slots: Tensor | None = None
    tables: Tensor | None = None


NO_FURTHER_ROWS: Mapping[RowDomain, FurtherRows] = MappingProxyType({})


@dataclass(slots=True)
class TorchStep(ABC):
    """One step.

    inputs: inputs of a segment of a graph.
    values: computed values, [rows, cols].
    codes: codes that replace the values read by a product.
    further: rows of domains that `rows` does not describe completely or at all. Positions with several components are
    an example.
    avoids_host: nothing may wait for the device or depend on its numbers, as in a captured step.
    repeats: no row may depend on another row or on the number of rows; libraries are not used for sums.
    out: where to put the output of the current operation, possibly in the memory of an input if the operation allows it
    (`Op.in_place`); None means anywhere. A result that a form returns elsewhere is copied there.
    """

    rows: StepRows
    inputs: Sequence[Tensor] = ()
    further: Mapping[RowDomain, FurtherRows] = field(default_factory=dict)
    values: dict[Value, Tensor] = field(default_factory=dict)
    codes: dict[Value, CodedRows] = field(default_factory=dict)
    rotations: dict[tuple[RopeParams, RowDomain], tuple[Tensor, Tensor]] = field(default_factory=dict)
    avoids_host: bool = False
    repeats: bool = False
    out: Tensor | None = None

    def begin(self, node: Node) -> None:  # noqa: B027 - steps without a workspace have nothing to do
        """Set `out` for the operation of a node."""

    def find(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:  # noqa: ARG002
        """Return memory of this shape and type that is valid while the operation runs; None means that torch should
        allocate it.
        """
        return None

    def rows_of(self, value: Value) -> Tensor | CodedRows:
        """Return the input of a product. If the input is codes, no other operation reads it."""
        return self.codes.pop(value) if value in self.codes else self.values[value]

    def count_of(self, domain: RowDomain) -> int:
        """Return the number of a domain's rows in the step."""
        if domain is TOKENS:
            return len(self.rows.token_ids)
        return len(self.rows.wanted) if domain is OUTPUTS or domain is LOGITS else self.further[domain].count

    def spans_of(self, domain: RowDomain) -> list[slice]:
        """Return the rows of each sequence of a domain."""
        if domain is TOKENS:
            return self.rows.spans
        return [slice(begin, end) for begin, end in pairwise(self.further[domain].starts)]

    def index_of(self, index: IndexArray) -> Tensor | None:
        """Return an index array, [rows * width], or None if the step has none."""
        if index == SELECTED:
            return self.rows.wanted
        found = self.further.get(index.rows)
        return None if found is None else found.indices.get(index.name)

    def low_rank(self, op: AddLowRank, x: Tensor, slots: Tensor) -> Tensor:  # noqa: ARG002
        """Multiply rows x by the low-rank factors of the adapters in their slots -> [rows, columns of all weights]."""
        raise GraphError(f"{op.name}: this step holds no adapters")

    def rare_changes(self, op: BesideWeights) -> Mapping[int, Sequence[RareChange]]:  # noqa: ARG002
        """Return the changes of an operation's output that are more than low-rank products, by slot."""
        return {}

    @abstractmethod
    def weight(self, parameter: Parameter) -> Tensor:
        """Return the numbers of a weight, in its shape."""

    @abstractmethod
    def attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        p: AttentionParams,
        tables: HeadTables,
        out: Tensor | None = None,
    ) -> Tensor:
        """Apply causal attention over all tokens of each sequence so far -> [tokens, p.output_width].

        q, k, v: [tokens, columns] of the step. If k and v are None, the keys and values of the earlier operation on
        this layer are used. If v has no columns, the values are the first columns of the keys.
        """

    def attend_across(self, op: CrossAttention) -> Tensor:
        """See `CrossAttention`. Raises GraphError if there is no cache."""
        raise GraphError(f"{op.name}: the operation reads a cache, which whole texts do not have")

    def sum_over_ranks(self, op: AllReduce) -> Tensor:
        """Sum a value over the ranks of a group. Raises GraphError if there is no group."""
        raise GraphError(f"{op.name}: the operation needs its group of {op.size} ranks")

    def side_by_side_of_ranks(self, op: AllGather) -> Tensor:
        """Concatenate the columns of a value of all ranks. Raises GraphError if there is no group."""
        raise GraphError(f"{op.name}: the operation needs its group of {op.size} ranks")

    @abstractmethod
    def read_states(self, cache: StateCache) -> list[Tensor]:
        """Return the states of all sequences before the step, [N, *shape] each; zeros for a sequence that begins."""

    @abstractmethod
    def write_states(self, cache: StateCache, after: Tensor, saved: Sequence[Tensor]) -> None:
        """Store the states after the step [N, *shape].

        saved: the states after each of `StepRows.saves`, in the same shape.
        """

    def product(self, x: Tensor, parameter: Parameter, index: int | None = None) -> Tensor:
        """Multiply x [rows, in] by the transpose of a matrix, or of matrix `index` of a stack."""
        weight = self.weight(parameter)
        return functional.linear(x, weight if index is None else weight[index])

    def linear(
        self,
        x: Tensor | CodedRows,
        weights: Sequence[Parameter],
        biases: Sequence[Parameter | None],
        residual: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        out: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        """Multiply x [rows, in] by the transposes of matrices, side by side, and add each one's bias and the residual.

        x: codes only if made by `normed_for` or `gated`.
        dtype: type of the result; None means the type of x.
        out: see `TorchStep`; it may be the residual's memory.
        """
        assert isinstance(x, Tensor)
        parts = [self.product(x, weight) for weight in weights]
        for i, bias in enumerate(biases):
            parts[i] = parts[i] if bias is None else parts[i] + self.weight(bias).to(parts[i].dtype)
        product = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        product = product if residual is None else product + residual
        return product if dtype is None else product.to(dtype)

    def stacked_product(self, x: Tensor, parameter: Parameter) -> Tensor:
        """Multiply each of n parts of x [rows, n, in] by the transpose of its matrix in a stack -> [rows, n, out]."""
        return (x.transpose(0, 1) @ self.weight(parameter).transpose(1, 2)).transpose(0, 1)

    def sums(self, x: Tensor) -> Tensor:
        """Sum over the last dimension, and keep it with size 1."""
        return x.sum(dim=-1, keepdim=True)

    def mean(self, x: Tensor) -> Tensor:
        """Average over the last dimension, and keep it with size 1."""
        return self.sums(x) / x.shape[-1]

    def normed(
        self,
        x: Tensor,
        weight: Tensor | None,
        group: int,
        eps: float,
        out: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        """Apply RMSNorm to x [rows, cols] over groups of columns."""
        return rms_norm(x, weight, group, eps)

    def layernormed(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        out: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        """Apply LayerNorm to x [rows, cols]."""
        bias = None if bias is None else wide(bias)
        return functional.layer_norm(wide(x), x.shape[-1:], wide(weight), bias, eps).to(x.dtype)

    def normed_for(
        self,
        x: Tensor,
        norm: Parameter,
        eps: float,
        weights: Sequence[Parameter],  # noqa: ARG002
    ) -> Tensor | CodedRows:
        """Apply RMSNorm to x [rows, cols] and return it in the form that the product with these weights expects."""
        return self.normed(x, self.weight(norm), x.shape[-1], eps, self.find(tuple(x.shape), x.dtype))

    def gate_product(self, x: Tensor | CodedRows, op: FusedLinear, out: Tensor | None = None) -> Tensor | CodedRows:
        """Return op.kind(gate) * up, where gate and up are the product of `op` with x."""
        memory = self.find((len(x), 2 * op.weights[0].shape[0]), x.dtype)
        gate, up = torch.chunk(self.linear(x, op.weights, op.biases, out=memory), 2, dim=-1)
        return self.gated(gate, up, op, out)

    def rotated(self, x: Tensor, head_dim: int, rope: RopeParams, domain: RowDomain = TOKENS) -> Tensor:
        """Apply the rotary embedding of each row's position to x [rows, heads * head_dim]."""
        return rotate(x, head_dim, self.rotation(rope, x.dtype, domain))

    def gated(
        self, gate: Tensor, up: Tensor, op: FusedLinear | GatedActivation, out: Tensor | None = None
    ) -> Tensor | CodedRows:
        """Return op.kind(gate) * up, in the form expected by the product that reads the output of `op`."""
        assert op.kind is not None
        return torch.mul(ACTIVATIONS[op.kind](gate), up, out=out)

    def activated(self, x: Tensor, kind: str, out: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Return kind(x)."""
        return ACTIVATIONS[kind](x)

    def prepared_queries(self, op: FusedAttention, qkv: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return the queries of `op` after norm and rotation, with its keys and values already written to the cache.

        None means that the step does not do this.
        """
        return None

    def experts(self, op: MoE, x: Tensor, choice: tuple[Tensor, Tensor]) -> Tensor | None:  # noqa: ARG002
        """Return the output of the experts that rows have chosen, with their weights, both [rows, top_k].

        None means that the step leaves this to the operation's form.

        Experts are numbered from the first one on this rank; identities and other ranks' experts are out of range.
        """
        return None

    def advanced(self, op: ShortConv | GatedDeltaRule | SelectiveScan) -> Tensor | None:  # noqa: ARG002
        """Return the output of an operation with states and update the states. None means that the step does not do
        this.
        """
        return None

    def embed(self, index: Tensor, parameter: Parameter, out: Tensor | None = None) -> Tensor:
        """Look up rows of a table."""
        return torch.index_select(self.weight(parameter), 0, index, out=out)

    def rotation(self, rope: RopeParams, dtype: torch.dtype, domain: RowDomain = TOKENS) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of all rows [rows, 1, rotated pairs], computed once per step."""
        if (rope, domain) not in self.rotations:
            frequencies = constant(rope.frequencies, torch.float64, self.rows.positions.device)
            # In float64: at position 100,000 a float32 angle is off by 0.004 radians.
            angles = self._positions_of(rope, domain).to(torch.float64)[:, None] * frequencies
            factor = rope.attention_factor
            self.rotations[rope, domain] = (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
        return self.rotations[rope, domain]

    def _positions_of(self, rope: RopeParams, domain: RowDomain) -> Tensor:
        """Return positions [rows, rotated pairs], or [rows, 1] if all pairs of a row have the same position."""
        further = self.further.get(domain)
        if further is None or further.positions is None:
            return self.rows.positions[:, None]
        return further.positions[list((rope.axes if len(further.positions) > 1 else None) or (0,))].T


@cache  # never evicted, because captured steps read constants at their addresses
def constant(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an operation's numbers as a tensor on the device, created once."""
    return torch.tensor(numbers, dtype=dtype, device=device)
