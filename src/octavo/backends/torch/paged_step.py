"""A step over the paged cache, in plain torch or with Triton kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from octavo.backends import ExecutorLimits
from octavo.backends.torch.adapters import AdapterTable, RareChange, SlotRows, rows_by_slot
from octavo.backends.torch.attention import Queries, attend, attend_all, scaled_queries
from octavo.backends.torch.cache import LayerPages, PagedCache
from octavo.backends.torch.coded import CodedRows, CodeForm, Find, nowhere
from octavo.backends.torch.kernels.planes import Planes
from octavo.backends.torch.plain import ProductEnd, linear
from octavo.backends.torch.quantized import dequantized, matrix_of, product
from octavo.backends.torch.rank_group import TorchRankGroup
from octavo.backends.torch.sampler import Samples
from octavo.backends.torch.step import HeadTables, TorchStep, constant
from octavo.backends.torch.step_arrays import EqualSequences, StepArrays
from octavo.backends.torch.weights import DeviceWeights
from octavo.backends.torch.workspace import Workspace
from octavo.batch import SamplingBatch
from octavo.graph.builder import Graph, Node
from octavo.graph.cache import StateCache
from octavo.graph.ops.attention import AttentionParams, FusedAttention, RopeParams
from octavo.graph.ops.base import Op
from octavo.graph.ops.collective import AllGather, AllReduce
from octavo.graph.ops.encoder import CrossAttention
from octavo.graph.ops.linear import FusedLinear
from octavo.graph.ops.low_rank import ADAPTER_SLOTS, AddLowRank, BesideWeights
from octavo.graph.ops.moe import MoE
from octavo.graph.ops.recurrence import GatedDeltaRule, SelectiveScan, ShortConv
from octavo.graph.ops.rowwise import GatedActivation
from octavo.graph.values import LOGITS, OUTPUTS, TOKENS, Parameter, RowDomain, Value

if TYPE_CHECKING:
    from octavo.backends.torch.kernels.experts import Sorted


class StepKernels(Protocol):
    """The interface of `octavo.backends.torch.triton_calls`. The arrays of a step are int32."""

    def __hash__(self) -> int: ...

    def linear(
        self, x: Tensor | CodedRows, matrix: Planes | Tensor, end: ProductEnd, *, repeats: bool, find: Find = nowhere
    ) -> Tensor: ...

    def rows_of(self, p: Planes, index: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor: ...

    def normed(self, x: Tensor, weight: Tensor | None, group: int, eps: float, out: Tensor | None) -> Tensor: ...

    def layernormed(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor | None) -> Tensor: ...

    def activated(self, x: Tensor, kind: str, out: Tensor | None) -> Tensor: ...

    def normed_codes(self, x: Tensor, weight: Tensor, eps: float, form: CodeForm, find: Find) -> CodedRows: ...

    def rotated(self, x: Tensor, head_dim: int, angles: Tensor, positions: Tensor, out: Tensor | None) -> Tensor: ...

    def write_cache(self, pages: LayerPages, slots: Tensor, keys: Tensor, values: Tensor) -> None: ...

    def gate(
        self, x: Tensor, matrix: Planes | Tensor, bias: Tensor | None, kind: str, out: Tensor | None
    ) -> Tensor | None: ...

    def gated_product(
        self, x: Tensor, up: Tensor, kind: str, form: CodeForm | None, out: Tensor | None
    ) -> Tensor | CodedRows: ...

    def prepared_queries(
        self,
        op: FusedAttention,
        qkv: Tensor,
        pages: LayerPages,
        positions: Tensor,
        slots: Tensor,
        tensors: tuple[Tensor | None, Tensor | None, Tensor | None],
        out: Tensor | None,
    ) -> Tensor: ...

    def angles(self, rope: RopeParams, positions: int, device: torch.device) -> Tensor: ...

    def angles_bytes(self, graph: Graph, limits: ExecutorLimits) -> int: ...

    def parts_shape(self, p: AttentionParams, sequences: int, max_length: int) -> tuple[int, ...] | None: ...

    def attend(
        self,
        q: Tensor,
        pages: LayerPages,
        p: AttentionParams,
        some: EqualSequences,
        sinks: Tensor | None,
        *,
        repeats: bool,
        memory: tuple[Tensor | None, Tensor | None],
    ) -> Tensor: ...

    def experts(
        self,
        op: MoE,
        x: Tensor,
        choice: tuple[Tensor, Tensor],
        matrices: Sequence[Planes | Tensor],
        biases: Sequence[Tensor | None],
        *,
        repeats: bool,
    ) -> Tensor: ...

    def sorted_by_slot(self, slots: Tensor, num_slots: int) -> Sorted: ...

    def low_rank(self, x: Tensor, a: Tensor, b: Tensor, places: Sorted) -> Tensor: ...

    def advanced(
        self,
        op: ShortConv | GatedDeltaRule | SelectiveScan,
        values: Sequence[Tensor],
        state: Tensor,
        weights: Sequence[Tensor | None],
        arrays: StepArrays,
        out: Tensor | None,
    ) -> Tensor: ...

    def sampled(self, logits: Tensor, batch: SamplingBatch, num_top: int, draws: Tensor | None = None) -> Samples: ...


@dataclass(slots=True)
class PagedStep(TorchStep):
    """A step over the paged cache.

    calls: the Triton kernels; None means plain torch.
    small: `arrays` in int32, for kernels.
    angles: results of `StepKernels.angles` for `max_positions`, shared by the steps of an executor.
    group: the ranks that compute the other parts of the graph.
    widths: number of columns that each rank has of each gathered value.
    feeds: result of `octavo.graph.feeds.fed_products`.
    workspace: workspace of the executor.
    """

    weights: DeviceWeights = field(kw_only=True)
    cache: PagedCache = field(kw_only=True)
    arrays: StepArrays = field(kw_only=True)
    small: StepArrays = field(kw_only=True)
    calls: StepKernels | None = None
    max_positions: int = 0
    angles: dict[RopeParams, Tensor] = field(default_factory=dict)
    group: TorchRankGroup | None = None
    widths: Mapping[AllGather, Sequence[int]] = field(default_factory=dict)
    feeds: Mapping[Op, tuple[Parameter, ...]] = field(default_factory=dict)
    workspace: Workspace = field(kw_only=True)
    num_outputs: int = 0  # number of OUTPUTS and LOGITS rows being computed
    draws: Tensor | None = None  # random numbers for its rows of logits if they depend on the previous step

    adapters: AdapterTable | None = None  # None if the graph has none

    # The rows of each adapter, by the value that contains their slots and the number of rows: with and without kernels.
    sorted_slots: dict[tuple[Value, int], Sorted] = field(default_factory=dict)
    grouped_slots: dict[tuple[Value, int], list[SlotRows]] = field(default_factory=dict)

    def low_rank(self, op: AddLowRank, x: Tensor, slots: Tensor) -> Tensor:
        assert self.adapters is not None, "a graph with adapters has a table"
        key = op.slots, len(x)
        if self.calls is None or op.heads > 1:
            if key not in self.grouped_slots:
                self.grouped_slots[key] = rows_by_slot(slots)
            return self.adapters.products(op, x, self.grouped_slots[key])
        if key not in self.sorted_slots:
            self.sorted_slots[key] = self.calls.sorted_by_slot(slots, op.num_slots)
        made = [self.calls.low_rank(x, a[0], b[0], self.sorted_slots[key]) for a, b in self.adapters.factors(op)]
        return torch.where(slots >= 0, torch.cat(made, dim=1), 0.0)

    def rare_changes(self, op: BesideWeights) -> Mapping[int, Sequence[RareChange]]:
        if self.adapters is None or self.index_of(ADAPTER_SLOTS) is None:
            return {}
        return self.adapters.rare(op)

    def take_outputs(self, whole: Mapping[Value, Tensor], rows: slice) -> None:
        """Restrict the step to these rows of the outputs.

        whole: the step's values for all output rows.
        """
        for value, tensor in whole.items():
            self.values[value] = tensor[rows] if value.rows is OUTPUTS else tensor
        self.num_outputs = rows.stop - rows.start
        if rows.start > 0:  # the sorted slots belong to other outputs
            self.sorted_slots.clear()
            self.grouped_slots.clear()

    def begin(self, node: Node) -> None:
        value = node.output
        self.workspace.begin(node)
        count = self.num_outputs if value.rows is OUTPUTS or value.rows is LOGITS else self.count_of(value.rows)
        self.out = self.workspace.place(value, count)

    def find(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        return self.workspace.find(shape, dtype)

    def weight(self, parameter: Parameter) -> Tensor:
        return self.weights[parameter]

    def product(self, x: Tensor, parameter: Parameter, index: int | None = None) -> Tensor:
        planes = self.weights.planes.get(parameter)
        if planes is None:
            return TorchStep.product(self, x, parameter, index)
        return product(x, planes if index is None else matrix_of(planes, index))

    def linear(
        self,
        x: Tensor | CodedRows,
        weights: Sequence[Parameter],
        biases: Sequence[Parameter | None],
        residual: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        found = self.weights.matrix(weights)
        if found is None:  # the types differ, so each is a separate product
            parts = [self.linear(x, (w,), (b,)) for w, b in zip(weights, biases, strict=True)]
            whole = torch.cat(parts, dim=-1)
            whole = whole if residual is None else whole + residual
            return whole if dtype is None else whole.to(dtype)
        end = ProductEnd(self.weights.vector(biases), residual, dtype, out)
        if self.calls is not None:
            return self.calls.linear(x, found, end, repeats=self.repeats, find=self.find)
        assert isinstance(x, Tensor)
        if isinstance(found, Tensor):
            return linear(x, found, end)
        whole = product(x, found)
        whole = whole if end.bias is None else whole + end.bias
        whole = whole if residual is None else whole + residual
        return whole if dtype is None else whole.to(dtype)

    def attend_across(self, op: CrossAttention) -> Tensor:
        p, rows, cache = op.params, self.further[op.domain], self.cache
        group, q = cache.layers[op.layer].group, self.values[op.q]
        assert rows.tables is not None
        if op.k is not None and op.v is not None and rows.count and rows.slots is not None:
            keys, values = (self.values[x].reshape(rows.count, p.num_kv_heads, p.head_dim) for x in (op.k, op.v))
            cache.write(op.layer, rows.slots[group], keys, values)
        out = torch.zeros_like(q) if self.out is None else self.out.zero_()
        for number, (span, length) in enumerate(zip(self.rows.spans, rows.lengths, strict=True)):
            if length:
                table = rows.tables[group, number : number + 1, : -(-length // cache.block_size)]
                keys, values = (x[0, :length].flatten(1).to(q.dtype) for x in cache.read(op.layer, table))
                out[span] = attend_all(q[span], keys, values, p)
        return out

    def sum_over_ranks(self, op: AllReduce) -> Tensor:
        if self.group is None:
            return TorchStep.sum_over_ranks(self, op)
        x = self.values[op.x]
        assert self.out is not None
        if self.out.data_ptr() != x.data_ptr():
            x = self.out.copy_(x)
        return self.group.sum(x, in_order=self.repeats)

    def side_by_side_of_ranks(self, op: AllGather) -> Tensor:
        if self.group is None:
            return TorchStep.side_by_side_of_ranks(self, op)
        return self.group.side_by_side(self.values[op.x], self.widths[op])

    def stacked_product(self, x: Tensor, parameter: Parameter) -> Tensor:
        if not self.repeats:
            return TorchStep.stacked_product(self, x, parameter)
        return torch.stack([self._one_order(x[:, i], m) for i, m in enumerate(self.weight(parameter))], dim=1)

    def sums(self, x: Tensor) -> Tensor:
        if not self.repeats:
            return TorchStep.sums(self, x)
        ones = constant((1.0,), x.dtype, x.device).expand(x.shape[-1])[None].contiguous()
        return self._one_order(x.flatten(0, -2), ones).reshape(*x.shape[:-1], 1)

    def _one_order(self, x: Tensor, matrix: Tensor) -> Tensor:
        """Multiply x [rows, in] by the transpose of a matrix, summing in the same order for every number of rows."""
        assert self.calls is not None
        return self.calls.linear(x, matrix, ProductEnd(), repeats=True)

    def normed(self, x: Tensor, weight: Tensor | None, group: int, eps: float, out: Tensor | None = None) -> Tensor:
        if self.calls is None:
            return TorchStep.normed(self, x, weight, group, eps)
        return self.calls.normed(x, weight, group, eps, out)

    def layernormed(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor | None = None
    ) -> Tensor:
        if self.calls is None:
            return TorchStep.layernormed(self, x, weight, bias, eps)
        return self.calls.layernormed(x, weight, bias, eps, out)

    def _form_for(self, weights: Sequence[Parameter]) -> CodeForm | None:
        """Return the form of codes that the product with these weights expects, or None for plain numbers."""
        found = self.weights.matrix(weights) if weights else None
        return found.inputs if isinstance(found, Planes) else None

    def normed_for(self, x: Tensor, norm: Parameter, eps: float, weights: Sequence[Parameter]) -> Tensor | CodedRows:
        form = self._form_for(weights)
        if self.calls is None or form is None:
            return TorchStep.normed_for(self, x, norm, eps, weights)
        return self.calls.normed_codes(x, self.weight(norm), eps, form, self.find)

    def gate_product(self, x: Tensor | CodedRows, op: FusedLinear, out: Tensor | None = None) -> Tensor | CodedRows:
        found, form = self.weights.matrix(op.weights), self._form_for(self.feeds.get(op, ()))
        if self.calls is not None and not self.repeats and form is None and found is not None and isinstance(x, Tensor):
            assert op.kind is not None
            done = self.calls.gate(x, found, self.weights.vector(op.biases), op.kind, out)
            if done is not None:
                return done
        return TorchStep.gate_product(self, x, op, out)

    def rotated(self, x: Tensor, head_dim: int, rope: RopeParams, domain: RowDomain = TOKENS) -> Tensor:
        if (
            self.calls is None or domain in self.further
        ):  # the kernel only looks up angles of positions that count tokens
            return TorchStep.rotated(self, x, head_dim, rope, domain)
        # Not in place: threads read what others write.
        is_apart = self.out is not None and self.out.data_ptr() != x.data_ptr()
        out = self.out if is_apart else self.find(tuple(x.shape), x.dtype)
        return self.calls.rotated(x, head_dim, self._angles_of(rope), self.small.rows.positions, out)

    def _angles_of(self, rope: RopeParams) -> Tensor:
        assert self.calls is not None
        if rope not in self.angles:
            self.angles[rope] = self.calls.angles(rope, self.max_positions, self.cache.device)
        return self.angles[rope]

    def gated(
        self, gate: Tensor, up: Tensor, op: FusedLinear | GatedActivation, out: Tensor | None = None
    ) -> Tensor | CodedRows:
        if self.calls is None:
            return TorchStep.gated(self, gate, up, op, out)
        assert op.kind is not None
        return self.calls.gated_product(gate, up, op.kind, self._form_for(self.feeds.get(op, ())), out)

    def activated(self, x: Tensor, kind: str, out: Tensor | None = None) -> Tensor:
        return TorchStep.activated(self, x, kind) if self.calls is None else self.calls.activated(x, kind, out)

    def prepared_queries(self, op: FusedAttention, qkv: Tensor) -> Tensor | None:
        if self.calls is None or (op.rope is not None and TOKENS in self.further):
            return None
        pages = self.cache.layers[op.params.layer]
        norms = [None if p is None else self.weight(p) for p in (op.q_norm, op.k_norm)]
        tensors = (norms[0], norms[1], None if op.rope is None else self._angles_of(op.rope))
        small, p = self.small, op.params
        memory = self.find((len(qkv), p.num_heads, p.head_dim), qkv.dtype)
        slots = small.slots[pages.group]
        return self.calls.prepared_queries(op, qkv, pages, small.rows.positions, slots, tensors, memory)

    def embed(self, index: Tensor, parameter: Parameter, out: Tensor | None = None) -> Tensor:
        planes = self.weights.planes.get(parameter)
        if planes is None:
            return TorchStep.embed(self, index, parameter, out)
        order, dtype = planes.column_order, self.weights.dtype
        if self.calls is None:
            found = dequantized(planes, dtype, index)
        else:
            found = self.calls.rows_of(planes, index, dtype, out if order is None else None)
        return found if order is None else torch.empty_like(found).index_copy_(1, order, found)

    def attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        p: AttentionParams,
        tables: HeadTables,
        out: Tensor | None = None,
    ) -> Tensor:
        group = self.cache.layers[p.layer].group
        if k is not None and v is not None:
            keys, values = (x.reshape(len(x), p.num_kv_heads, x.shape[1] // p.num_kv_heads) for x in (k, v))
            if self.calls is None:
                self.cache.write(p.layer, self.arrays.slots[group], keys, values)
            else:
                self.calls.write_cache(self.cache.layers[p.layer], self.small.slots[group], keys, values)
        heads = scaled_queries(q, p, self.rows.positions).reshape(len(q), p.num_heads, p.head_dim)
        out = q.new_empty((len(q), p.output_width)) if out is None else out
        for some, small in zip(self.arrays.sequences, self.small.sequences, strict=True):
            if some.rows is None:  # all sequences have the same number of tokens
                return self._attended(heads, p, (some, small), tables, out)
            # These tokens are not contiguous.
            own = torch.index_select(heads, 0, some.rows, out=self.find((len(some.rows), *heads.shape[1:]), q.dtype))
            mixed = self._attended(own, p, (some, small), tables, self.find((len(own), p.output_width), q.dtype))
            out.index_copy_(0, some.rows, mixed)
        return out

    def _attended(
        self,
        q: Tensor,
        p: AttentionParams,
        some: tuple[EqualSequences, EqualSequences],
        tables: HeadTables,
        out: Tensor | None,
    ) -> Tensor:
        """Return the mixed values [n * t, output width] of queries [n * t, num_heads, head_dim].

        some: sequences with t tokens each, as in `arrays` and in `small`.
        """
        group = self.cache.layers[p.layer].group
        window = some[1].windows[group]
        last = self._last_seen(p, some[0])
        if self.calls is not None and last is None and tables.distance_bias is None:
            length = window.tables.shape[1] * self.cache.block_size
            shape = self.calls.parts_shape(p, len(window.end), length)
            parts = None if shape is None else self.workspace.find(shape, torch.float32)
            pages = self.cache.layers[p.layer]
            found = tables.sinks
            return self.calls.attend(q, pages, p, some[1], found, repeats=self.repeats, memory=(out, parts))
        window, positions = some[0].windows[group], some[0].positions
        keys, values = (x.to(q.dtype) for x in self.cache.read(p.layer, window.tables))
        if not values.shape[-1]:
            values = keys[..., : p.cache.value_dim]
        own = q.reshape(*positions.shape, p.num_heads, p.head_dim)
        mixed = attend(Queries(own, keys, values, positions, window.first, window.end, last), p, tables)
        return mixed.reshape(-1, p.output_width)

    def _last_seen(self, p: AttentionParams, some: EqualSequences) -> Tensor | None:
        """Return the last position that each token of these sequences sees [n, t]; None means its own position."""
        further = self.further.get(TOKENS)
        if not p.sees_spans or further is None or further.positions is None or len(further.positions) < 2:
            return None
        last = further.positions[1] if some.rows is None else further.positions[1][some.rows]
        return last.reshape(some.positions.shape)

    def experts(self, op: MoE, x: Tensor, choice: tuple[Tensor, Tensor]) -> Tensor | None:
        if self.calls is None:
            return None
        matrices = [self.weights.planes.get(p, None) or self.weight(p) for p in (op.gate, op.up, op.down)]
        biases = [None if p is None else self.weight(p) for p in (op.gate_bias, op.up_bias, op.down_bias)]
        return self.calls.experts(op, x, choice, matrices, biases, repeats=self.repeats)

    def advanced(self, op: ShortConv | GatedDeltaRule | SelectiveScan) -> Tensor | None:
        if self.calls is None:
            return None
        (state,) = self.cache.states[op.cache.index]
        weights = [None if p is None else self.weight(p) for p in _weights_of(op)]
        return self.calls.advanced(op, [self.values[x] for x in op.inputs], state, weights, self.small, self.out)

    def read_states(self, cache: StateCache) -> list[Tensor]:
        is_fresh, slots = self.arrays.is_fresh, self.arrays.state_slots
        assert is_fresh is not None
        found = [array[slots] for array in self.cache.states[cache.index]]
        return [torch.where(is_fresh.ne(0).reshape(-1, *[1] * (x.dim() - 1)), 0.0, x) for x in found]

    def write_states(self, cache: StateCache, after: Tensor, saved: Sequence[Tensor]) -> None:
        (array,) = self.cache.states[cache.index]
        array[self.arrays.state_slots] = after.to(array.dtype)
        slots = self.arrays.saved_slots
        for number, state in enumerate(saved):
            assert slots is not None
            array[slots[number]] = state.to(array.dtype)


def _weights_of(op: ShortConv | GatedDeltaRule | SelectiveScan) -> tuple[Parameter | None, ...]:
    """Return an operation's parameters in the order that its kernel takes."""
    if isinstance(op, ShortConv):
        return op.weight, op.bias
    return op.parameters
