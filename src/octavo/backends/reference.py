"""The specification: a numpy interpreter of graphs in float32 or float64, including the paged cache.

Every other backend is tested against it, operation by operation. The meaning of an operation is defined in
`octavo.graph.ops`; this module contains only the step, the weights and the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod

import numpy as np
from numpy.typing import DTypeLike

from octavo.backends import (
    PACKING,
    BackendDescription,
    Executor,
    ExecutorLimits,
    FinishedStep,
    PackCacheOptions,
    RankGroup,
    check_model_len,
    check_token_types,
    refuse_fp8_cache,
)
from octavo.backends.memory import PackedType, Sizes
from octavo.backends.memory import host_memory as memory  # noqa: F401 - of the backend protocol
from octavo.backends.moved_blocks import MovedSizes
from octavo.backends.parameters import parameter_info, weight_of
from octavo.backends.sampling import sample
from octavo.batch import Array, Batch, BlockBytes, StepOutput
from octavo.config import KVDtype, LoadProgress
from octavo.errors import GraphError, UsageError
from octavo.graph.adapters import low_rank_pass
from octavo.graph.builder import Graph
from octavo.graph.cache import CacheSizes
from octavo.graph.domain_rows import domain_rows
from octavo.graph.domains import check_domains, check_limits, check_sequences, domain_needs
from octavo.graph.layer_formats import layer_formats
from octavo.graph.ops.base import Evaluation, LayerCache, Observer
from octavo.graph.ops.collective import Collective
from octavo.graph.ops.low_rank import BesideWeights, LowRank
from octavo.graph.ops.recurrence import check_states
from octavo.graph.passes import optimize
from octavo.graph.segments import check_inputs
from octavo.graph.values import Parameter
from octavo.quantization.packed import Weight

PAGES_WEIGHTS = False


def compile(  # noqa: A001 - the backend protocol's name
    graph: Graph | Sizes,
    weights: Mapping[str, Weight],
    limits: ExecutorLimits,
    *,
    num_threads: int = 0,  # noqa: ARG001 - numpy decides
    progress: LoadProgress | None = None,
    pack_cache: PackCacheOptions | None = None,  # noqa: ARG001 - nothing is packed
    kv_dtype: KVDtype | None = None,
    dtype: DTypeLike = np.float32,
) -> ReferenceExecutor:
    """Compile `graph` to an executor in `dtype`, float32 or float64. See `octavo.backends.Backend.compile`.

    kv_dtype: the type to which keys and values are rounded; they are stored in `dtype`. None means no rounding.
    """
    graph = graph.graph if isinstance(graph, Sizes) else _with_adapters(graph, limits)
    check_model_len(graph, limits)
    check_limits(graph, limits.rows)
    dense: dict[Parameter, Array] = {}
    ends = [*accumulate(parameter_info(weights, p).nbytes for p in graph.parameters)]
    for parameter, loaded in zip(graph.parameters, ends, strict=True):
        # One order in memory: with another, BLAS may take other kernels, whose last bits differ.
        dense[parameter] = weight_of(weights, parameter).dequantize().astype(dtype, order="C", copy=False)
        if progress is not None:
            progress(PACKING, loaded, ends[-1])
    return ReferenceExecutor(graph, dense, limits, kv_dtype, dtype)


def sizes(
    graph: Graph,
    weights: Mapping[str, Weight],
    limits: ExecutorLimits,
    *,
    num_threads: int = 0,  # noqa: ARG001 - numpy decides
    kv_dtype: KVDtype | None = None,  # the cache is kept in float32
) -> Sizes:
    """See `octavo.backends.Backend`; returns the sizes of an executor in float32."""
    refuse_fp8_cache(kv_dtype, "reference")
    graph = _with_adapters(graph, limits)
    check_limits(graph, limits.rows)
    infos = {p: parameter_info(weights, p) for p in graph.parameters}
    packed = {p: 4 * prod(p.shape) for p in infos}
    matrices = {p: PackedType(infos[p].type_name, "F32", infos[p].nbytes, packed[p]) for p in infos if p.is_matrix}
    workspace = 4 * _workspace_elements(graph, limits)
    return Sizes(graph, packed, matrices, workspace, _cache_sizes(graph, 4), {})


def _with_adapters(graph: Graph, limits: ExecutorLimits) -> Graph:
    return graph if limits.adapters is None else optimize(graph, (low_rank_pass(limits.adapters),))


def join_group(
    name: str,  # noqa: ARG001
    rank: int,  # noqa: ARG001
    size: int,  # noqa: ARG001
    buffer_bytes: int,  # noqa: ARG001
    given_up: Callable[[], str] | None = None,  # noqa: ARG001
) -> RankGroup:
    """See `octavo.backends.Backend`. Only faster backends run ranks in separate processes; this one has
    `ReferenceGroup`.
    """
    raise UsageError("the backend reference cannot run ranks in separate processes; use the backend cpu")


def describe() -> BackendDescription:
    """See `octavo.backends.Backend`."""
    return BackendDescription("numpy", "the only kernels of this backend", 1)


def _cache_sizes(graph: Graph, element_bytes: int) -> CacheSizes:
    """Return the cache sizes.

    Layers of all groups have separate memory, so that no group overwrites another unnoticed.
    """
    token_bytes = graph.kv_elements_per_token * element_bytes
    state_bytes = graph.state_elements_per_sequence * element_bytes
    formats = (f"float{8 * element_bytes}",) * len(graph.kv_caches)
    return CacheSizes(graph.cache_layout, token_bytes, token_bytes, state_bytes, formats)


def _workspace_elements(graph: Graph, limits: ExecutorLimits) -> int:
    """Return the number of elements of all values in the largest step. This backend does not reuse their memory."""
    return sum(limits.rows[n.output.rows] * n.output.cols for n in graph.nodes)


_RankStep = Generator[tuple[Collective, Array], Array, StepOutput]
"""A step of one rank. It yields its value for each operation of the group and receives the result."""


def _of_one_rank(step: _RankStep) -> StepOutput:
    event = _advanced(step, None)
    if isinstance(event, StepOutput):
        return event
    op, _ = event
    raise GraphError(f"{op.name}: the graph is that of one of {op.size} ranks; run it in their group")


def _advanced(step: _RankStep, result: Array | None) -> tuple[Collective, Array] | StepOutput:
    """Resume a rank's step with `result` of a collective operation, or None at its start.

    Return the collective operation at which it stops next, with the rank's input, or the output at the end of the step.
    """
    try:
        return next(step) if result is None else step.send(result)
    except StopIteration as end:
        output: StepOutput = end.value
        return output


class ReferenceGroup:
    """The executors of all ranks of a graph in this process. The ranks of a stage run in lockstep, node by node."""

    def __init__(self, *stages: Sequence[ReferenceExecutor]) -> None:
        """stages: the ranks of each pipeline stage, in order; a single stage means no pipeline."""
        self._stages = stages

    def run(self, batch: Batch) -> list[StepOutput]:
        """Run one step and return its output on every rank of the last stage.

        Raises GraphError if the ranks of a stage do not reach the same collective operations, or if a value for the
        next stage is not sent by exactly one of them.
        """
        for ranks in self._stages[:-1]:
            outputs = self._run_stage(ranks, replace(batch, sampling=None, return_logits=False))
            sent = [output.values for rank, output in zip(ranks, outputs, strict=True) if rank.sends]
            if len(sent) != 1:
                raise GraphError(f"{len(sent)} of {len(ranks)} ranks of a stage send")
            batch = replace(batch, inputs=sent[0])
        return self._run_stage(self._stages[-1], batch)

    def _run_stage(self, ranks: Sequence[ReferenceExecutor], batch: Batch) -> list[StepOutput]:
        steps = [executor.start(batch) for executor in ranks]
        results: list[Array | None] = [None] * len(steps)
        while True:
            events = [_advanced(step, result) for step, result in zip(steps, results, strict=True)]
            outputs = [event for event in events if isinstance(event, StepOutput)]
            met = [event for event in events if not isinstance(event, StepOutput)]
            if not met:
                return outputs
            if outputs or len({op.name for op, _ in met}) > 1:
                raise GraphError(f"of {len(steps)} ranks, {len(met)} met in {sorted({op.name for op, _ in met})}")
            parts = [value for _, value in met]
            results = [op.combine(parts) for op, _ in met]


class ReferenceExecutor:
    """Walks the graph with one numpy expression per node. Implements `octavo.backends.Executor`."""

    max_in_flight = 1
    settles_drafts = False
    num_stages = 1
    mapped_bytes = 0
    paging = None
    num_threads = 1  # the caller's; numpy's own threads are not counted

    def __init__(
        self,
        graph: Graph,
        weights: dict[Parameter, Array],
        limits: ExecutorLimits,
        kv_dtype: KVDtype | None,
        dtype: DTypeLike,
    ) -> None:
        self.observer: Observer | None = None  # `Evaluation.observer` of steps
        self._graph = graph
        self.sends = graph.sends
        self._weights = weights
        self._limits = limits
        self._needs = domain_needs(graph)
        self._kv_dtype = kv_dtype
        self._dtype = np.dtype(dtype)
        self.cache_sizes = _cache_sizes(graph, self._dtype.itemsize)
        self.weight_bytes = sum(w.nbytes for w in weights.values())
        self.workspace_bytes = _workspace_elements(graph, limits) * self._dtype.itemsize
        self._caches: dict[int, LayerCache] = {}
        self._states: dict[int, list[Array]] = {}
        self._num_states = 0
        self._adapters: dict[int, Mapping[str, LowRank]] = {}
        self._num_blocks, self._block_size = 0, 0
        self._moved = MovedSizes()

    def allocate_cache(self, num_blocks: int, block_size: int, num_states: int = 0) -> None:
        self._num_blocks, self._block_size = num_blocks, block_size
        self._moved = MovedSizes.of(self.cache_sizes, num_blocks, block_size, num_states)
        kv_dtype = self._kv_dtype
        formats = layer_formats(self._graph, lambda p: self._weights[p], kv_dtype) if kv_dtype is not None else {}
        for kv in self._graph.kv_caches:
            _, group = self.cache_sizes.layout.place(kv.layer)
            cache = self._caches[kv.layer] = LayerCache.empty(kv, num_blocks, block_size, self._dtype, group)
            if kv.layer in formats:
                cache.kv_dtype, mean = formats[kv.layer].kv_dtype, formats[kv.layer].key_mean
                cache.key_mean = None if mean is None else mean.reshape(kv.num_kv_heads, kv.key_dim)
        for state in self._graph.state_caches:
            self._states[state.index] = [np.full((num_states, *s), np.nan, self._dtype) for s in state.shapes]
        self._num_states = num_states

    def borrow_cache(self, other: Executor) -> None:
        """See `octavo.backends.BorrowingExecutor`."""
        assert isinstance(other, ReferenceExecutor)
        self._num_blocks, self._block_size, self._caches = other._num_blocks, other._block_size, other._caches

    def prepare_adapter(self, parts: Mapping[str, LowRank]) -> Mapping[str, LowRank]:
        """See `AdaptingExecutor`."""
        for op in (node.op for node in self._graph.nodes if isinstance(node.op, BesideWeights)):
            for _ in op.parts_of(parts):
                pass
        return parts

    def load_adapter(self, slot: int, prepared: Mapping[str, LowRank]) -> None:
        """See `AdaptingExecutor`."""
        self._adapters[slot] = prepared

    def drop_adapter(self, slot: int) -> None:
        """See `AdaptingExecutor`."""
        self._adapters.pop(slot, None)

    def submit(self, batch: Batch) -> FinishedStep:
        self._check(batch)
        return FinishedStep(lambda: _of_one_rank(self._compute(batch)))

    def _compute(self, batch: Batch) -> _RankStep:
        self._move_blocks(batch)
        for source, destination in batch.block_copies.tolist():
            self._copy_block(source, destination)
        for source, destination in batch.state_copies.tolist():
            for array in (array for arrays in self._states.values() for array in arrays):
                array[destination] = array[source]
        held = self._caches, self._states
        step = Evaluation(batch, self._dtype, self._weights, *held, {}, self.observer, self._adapters)
        graph = self._graph
        count, has_hidden = len(batch.logits_indices), bool(len(batch.hidden_indices))
        hidden = graph.hidden_states if has_hidden and graph.makes_logits else None
        for node in graph.nodes:
            rows = node.output.rows
            if rows in self._limits.further_rows and not domain_rows(batch, rows).count:
                step.values[node.output] = np.zeros((0, node.output.cols), self._dtype)
            elif isinstance(node.op, Collective) and node.op.size > 1:
                step.values[node.output] = yield node.op, step.values[node.op.x]
            else:
                step.values[node.output] = node.op.evaluate(step)
            if node.output == hidden and not count:
                break
        if batch.sampling is None or not graph.makes_logits or not count:
            output = StepOutput.unsampled(count)
        else:
            output = sample(step.values[graph.output][:count].astype(np.float32), batch.sampling)
        # Values are float64 where the executor was asked for it.
        if not graph.makes_logits:
            output.values = tuple(step.values[value] for value in graph.outputs)
        elif batch.return_logits and (count or hidden is None):
            output.logits = step.values[graph.output][:count]
        if hidden is not None:
            output.hidden_states = step.values[hidden][count:]
            output.taps = None if graph.tap is None else step.values[graph.tap][count:]
        return output

    def start(self, batch: Batch) -> _RankStep:
        """Start the step of one rank, which stops at each collective operation: see `ReferenceGroup`."""
        self._check(batch)
        return self._compute(batch)

    def _copy_block(self, source: int, destination: int) -> None:
        for cache in self._caches.values():
            size = cache.block_size
            for array in (cache.keys, cache.values):
                array[destination * size : (destination + 1) * size] = array[source * size : (source + 1) * size]

    def _move_blocks(self, batch: Batch) -> None:
        """Save and load blocks and states.

        A moved block contains all keys and then all values of each layer in turn; a state contains each of its arrays
        in turn.
        """
        _move(batch.block_saves, batch.block_loads, self._parts_of_block)
        _move(batch.snapshot_saves, batch.snapshot_loads, self._parts_of_states)

    def _parts_of_states(self, slot: int) -> Iterator[Array]:
        for arrays in self._states.values():
            yield from (array[slot].reshape(-1) for array in arrays)

    def _parts_of_block(self, block_id: int) -> Iterator[Array]:
        for cache in self._caches.values():
            first, end = block_id * cache.block_size, (block_id + 1) * cache.block_size
            for array in (cache.keys, cache.values):
                yield array[first:end].reshape(-1)

    def close(self) -> None:
        self._weights.clear()
        self.weight_bytes = 0
        self._caches.clear()
        self._states.clear()

    def _check(self, batch: Batch) -> None:
        check_inputs(self._graph.inputs, self._graph.makes_logits, batch)
        if self._graph.state_caches:
            check_states(batch, self._num_states)
        check_token_types(self._graph, batch)
        self._moved.check(batch)
        limits = self._limits
        check_domains(self._needs, limits.rows, batch, (self._num_blocks, self._block_size))
        check_sequences(batch, limits.max_num_seqs, limits.max_model_len)


def _move(saves: BlockBytes | None, loads: BlockBytes | None, parts_of: Callable[[int], Iterator[Array]]) -> None:
    """Save some blocks or states, then load others.

    parts_of: returns the arrays of a block or state, given its id.
    """
    if saves is not None:
        for block_id, row in zip(saves.block_ids.tolist(), saves.data, strict=True):
            row[:] = np.concatenate([part.view(np.uint8) for part in parts_of(block_id)])
    if loads is not None:
        for block_id, row in zip(loads.block_ids.tolist(), loads.data, strict=True):
            begin = 0
            for part in parts_of(block_id):
                part[:] = np.ascontiguousarray(row[begin : begin + part.nbytes]).view(part.dtype)
                begin += part.nbytes
