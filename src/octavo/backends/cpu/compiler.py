"""Compiles a graph to a native program: values become locations in the workspace, and operations become records.

The memory that the program will take is known before it is compiled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from octavo.backends import check_model_len, refuse_fp8_cache
from octavo.backends.cpu import _native
from octavo.backends.cpu.executor import CpuExecutor
from octavo.backends.cpu.instruction_set import choose_isa
from octavo.backends.cpu.lowering import PASSES, WeightOperand, lower
from octavo.backends.cpu.packing import packed_types
from octavo.backends.cpu.paging import plan_paging
from octavo.backends.cpu.row_numbers import RowNumbers
from octavo.backends.cpu.threads import ThreadPlan, plan_threads
from octavo.backends.cpu.weights import load_matrices, pack_cache_of, plain_weight
from octavo.backends.memory import PackedType, Sizes
from octavo.backends.parameters import parameter_info
from octavo.errors import GraphError
from octavo.graph.adapters import join_products, with_low_rank
from octavo.graph.cache import CacheSizes, KVCache, StateCache
from octavo.graph.domains import check_limits
from octavo.graph.feeds import fed_products
from octavo.graph.layer_formats import layer_formats
from octavo.graph.memory_plan import plan
from octavo.graph.ops.linear import Embedding, FusedLinear
from octavo.graph.ops.stages import BORDERS
from octavo.graph.passes import Pass, optimize
from octavo.graph.values import LOGITS, IndexArray, Parameter, RowDomain

if TYPE_CHECKING:
    from pathlib import Path

    from octavo.backends import ExecutorLimits, PackCacheOptions, Paging
    from octavo.config import KVDtype, LoadProgress
    from octavo.graph.builder import Graph
    from octavo.graph.layer_formats import LayerFormat
    from octavo.quantization.packed import Weight

_ELEMENT_BYTES = 4  # per value: the kernels compute in float32
_PADDED_TO = 16  # dimensions of a value in the cache, and elements of a state
_KEY_SCALE_DIMS = 32  # dimensions of a key with one scale
_SCALE_BYTES = 2


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """Options for tests and measurements; users have OCTAVO_ISA and OCTAVO_NUM_THREADS.

    isa: instruction set to use; None means the widest one, limited by OCTAVO_ISA.
    optimized: first rewrite the graph into fused operations.
    group: group of ranks that compute parts of the same layers, or None if there are no other ranks.
    beside: packed matrices of another program; this graph uses them instead of packing them again.
    checked: poison outputs before each operation, check that they are finite after it, and guard memory (slow).
    """

    isa: str | None = None
    optimized: bool = True
    checked: bool = False
    group: _native.CollectiveGroup | None = None
    beside: Mapping[Parameter, _native.PackedWeight] = field(default_factory=dict)


def compile(  # noqa: A001 - the backend protocol's name
    graph: Graph | Sizes,
    weights: Mapping[str, Weight],
    limits: ExecutorLimits,
    *,
    num_threads: int = 0,
    progress: LoadProgress | None = None,
    pack_cache: PackCacheOptions | None = None,
    kv_dtype: KVDtype = "float16",
    options: CompileOptions = CompileOptions(),
) -> CpuExecutor:
    """See `octavo.backends.Backend.compile`. Raises GraphError naming an operation without a native kernel."""
    isa = choose_isa(options.isa)
    _check_kernels(graph.graph if isinstance(graph, Sizes) else graph)
    check_model_len(graph.graph if isinstance(graph, Sizes) else graph, limits)
    if not isinstance(graph, Sizes):
        passes = PASSES if options.optimized else ()
        graph = sizes(graph, weights, limits, num_threads=num_threads, kv_dtype=kv_dtype, passes=passes)
    planned, graph = graph, graph.graph
    threads = plan_threads(num_threads)
    rows = RowNumbers.of(graph)
    program = _make_program(graph, limits, isa, threads, rows, checked=options.checked)
    if options.group is not None:
        program.join(options.group)
    matrices = [p for p in graph.parameters if p.is_matrix]
    shared = {p: options.beside[p] for p in matrices if p in options.beside}
    own = load_matrices(weights, [p for p in matrices if p not in shared], threads.count, progress, pack_cache)
    packed = shared | own
    if not options.checked:
        _keep_images(program, graph, packed)
    indices = _add_records(program, planned, weights, packed, rows.numbers)
    program.finish()
    weight_bytes = {p: packed[p].nbytes if p in packed else 4 * math.prod(p.shape) for p in graph.parameters}
    mapped_bytes = sum(weight.nbytes for weight in own.values() if weight.is_view)
    executor = CpuExecutor(program, graph, weight_bytes, mapped_bytes, planned.cache, isa, threads.count)
    executor.domain_names = frozenset(domain.name for domain in limits.rows)
    executor.weight_bytes -= sum(weight.nbytes for weight in shared.values())
    executor.compile_beside = partial(compile, options=CompileOptions(beside=packed))
    executor.guard = next((weight.guard for weight in own.values()), None)  # one file holds all of them
    if pack_cache is not None and pack_cache.resident_bytes is not None:
        paged = plan_paging(graph, planned.weights, pack_cache.resident_bytes)
        program.stream_weights([indices[p] for p in paged.streamed], paged.ahead_bytes)
        path = pack_cache_of(weights, matrices, pack_cache).path
        executor.paging = paged.paging(path, path)
    return executor


def expected_paging(sizes: Sizes, weights: Mapping[str, Weight], pack_cache: PackCacheOptions, sample: Path) -> Paging:
    """See `octavo.backends.Backend`."""
    if pack_cache.resident_bytes is None:
        raise ValueError("all weights stay in memory")
    path = pack_cache_of(weights, sizes.matrices, pack_cache).path
    plan = plan_paging(sizes.graph, sizes.weights, pack_cache.resident_bytes)
    return plan.paging(path, path if path.exists() else sample)


def sizes(
    graph: Graph,
    weights: Mapping[str, Weight],
    limits: ExecutorLimits,
    *,
    num_threads: int = 0,
    kv_dtype: KVDtype = "float16",
    passes: Sequence[Pass] = PASSES,
) -> Sizes:
    """See `octavo.backends.Backend`. Matrices without a kernel are counted as float16, because few contain numbers
    beyond its range.
    """
    refuse_fp8_cache(kv_dtype, "cpu")
    check_limits(graph, limits.rows)
    graph = optimize(graph, with_low_rank(tuple(passes), limits.adapters, join_products))
    formats = layer_formats(graph, lambda p: plain_weight(weights, p), kv_dtype)
    matrices = {p: _packed_matrix(weights, p) for p in graph.parameters if p.is_matrix}
    vectors = {p: 4 * math.prod(p.shape) for p in graph.parameters if not p.is_matrix}
    return Sizes(
        graph=graph,
        weights=vectors | {parameter: matrix.packed_bytes for parameter, matrix in matrices.items()},
        matrices=matrices,
        workspace_bytes=estimate_workspace_bytes(graph, limits, plan_threads(num_threads).count),
        cache=cache_sizes(graph, formats),
        kv_formats=formats,
    )


def _packed_matrix(weights: Mapping[str, Weight], parameter: Parameter) -> PackedType:
    info = parameter_info(weights, parameter)
    n, k = math.prod(parameter.shape[:-1]), parameter.shape[-1]
    packed_as = packed_types(info.type_name, parameter.shape)[0]
    num_bytes = _native.packed_nbytes(packed_as, n, k)
    return PackedType(info.type_name, packed_as, info.nbytes, num_bytes)


def cache_sizes(graph: Graph, formats: Mapping[int, LayerFormat]) -> CacheSizes:
    """Return the sizes of the cache.

    Layers that share a slot of a block share memory, sized for the largest of them.
    """
    layout = graph.cache_layout
    layers = {cache.layer: layer_bytes_per_token(cache, formats[cache.layer].kv_dtype) for cache in graph.kv_caches}
    slots = [0] * layout.slots
    for layer, num_bytes in layers.items():
        slot, _ = layout.place(layer)
        slots[slot] = max(slots[slot], num_bytes)
    states = sum(_padded(cache.elements_per_sequence) for cache in graph.state_caches) * _ELEMENT_BYTES
    types = tuple(formats[cache.layer].kv_dtype for cache in graph.kv_caches)
    return CacheSizes(layout, sum(layers.values()), sum(slots), states, types)


def _padded(elements: int) -> int:
    return -(-elements // _PADDED_TO) * _PADDED_TO


def layer_bytes_per_token(cache: KVCache, kv_dtype: KVDtype) -> int:
    """Return the bytes of one token in one layer: keys, padded values, and their scales (csrc/kv_cache.h)."""
    elements = cache.key_dim + _padded(cache.value_dim)
    if kv_dtype == "int8":
        scales = -(-cache.key_dim // _KEY_SCALE_DIMS) + 1
        return cache.num_kv_heads * (elements + scales * _SCALE_BYTES)
    return cache.num_kv_heads * elements * 2


def estimate_workspace_bytes(graph: Graph, limits: ExecutorLimits, num_threads: int) -> int:
    """Estimate the bytes of an optimized graph's values and the sampler's scratch, a few percent too low.

    The sampler holds seven numbers for each token of the vocabulary on each thread (csrc/sampling.cpp). The scratch of
    products and attention depends on the instruction set and is not included.
    """
    values = plan(graph, limits.rows, _ELEMENT_BYTES).total_bytes
    vocab_size = graph.output.cols if graph.makes_logits else 0
    return values + num_threads * vocab_size * 7 * 4


def _check_kernels(graph: Graph) -> None:
    known = set(_native.kernel_names())
    for node in graph.nodes:
        if node.op.name not in known and not isinstance(node.op, BORDERS):
            raise GraphError(f"{node.layer}: {node.op.name}: the cpu backend has no kernel for this operation")


def _make_program(
    graph: Graph, limits: ExecutorLimits, isa: str, threads: ThreadPlan, rows: RowNumbers, *, checked: bool
) -> _native.Program:
    """Create a program without operations. Its values are in the order of the graph's nodes."""
    memory = plan(graph, limits.rows, _ELEMENT_BYTES)
    values = [node.output for node in graph.nodes]
    # Token ids in a batch are limited by the rows of the embedding, not by a table of positions.
    tables = [node.op.num_rows for node in graph.nodes if isinstance(node.op, Embedding) and node.op.has_all]
    return _native.Program(
        isa,
        threads.count,
        threads.spin_us,
        (
            limits.max_num_batched_tokens,
            limits.max_num_seqs,
            limits.max_num_outputs,
            limits.max_model_len,
            min(tables, default=np.iinfo(np.int32).max),
        ),
        [(memory.offsets[value.id], value.cols, rows.domains[value.rows]) for value in values],
        memory.total_bytes,
        logits_rows=limits.rows[LOGITS],
        checked=checked,
        domains=[(n.domain.name, limits.rows[n.domain], n.components, n.starts, list(n.groups)) for n in rows.further],
        indices=[
            (n.index.name, rows.domains[n.index.rows], rows.domains[n.source], n.width, n.keeps) for n in rows.arrays
        ],
        token_components=rows.token_components,
    )


def _keep_images(program: _native.Program, graph: Graph, packed: Mapping[Parameter, _native.PackedWeight]) -> None:
    """Let gates store their outputs in the coded form (image) that the next product reads.

    This applies to a gate only if all weights of that product read an image.
    """
    feeds = fed_products(graph)
    for index, node in enumerate(graph.nodes):
        weights = [packed[p] for p in feeds.get(node.op, ()) if p in packed]
        if isinstance(node.op, FusedLinear) and weights and all(weight.reads_image for weight in weights):
            program.keep_as_image(index)


def _add_records(
    program: _native.Program,
    planned: Sizes,
    weights: Mapping[str, Weight],
    packed: Mapping[Parameter, _native.PackedWeight],
    numbers: Mapping[IndexArray | RowDomain, int],
) -> Mapping[WeightOperand, int]:
    """Add the operations to a program that already has their values. Return the indices of the weights."""
    layout, nodes = planned.graph.cache_layout, planned.graph.nodes
    values = {node.output: index for index, node in enumerate(nodes)}
    indices: dict[WeightOperand, int] = {p: program.add_packed_weight(weight) for p, weight in packed.items()}
    indices[None] = -1

    def index_of(operand: WeightOperand) -> int:
        """Return the index of a packed matrix or of a vector; a vector is added when it is first used."""
        if operand not in indices:
            array = plain_weight(weights, operand) if isinstance(operand, Parameter) else np.array(operand, np.float32)
            indices[operand] = program.add_plain_weight(array)
        return indices[operand]

    for node in nodes:
        if isinstance(node.op, BORDERS):  # the step itself fills and reads their values
            continue
        cache = node.op.cache
        kv = cache if isinstance(cache, KVCache) else None
        operands = lower(node.op, None if kv is None else planned.kv_formats[kv.layer], numbers)
        program.add_record(
            node.op.name,
            f"{node.layer}: {node.op.name}",
            values[node.output],
            [(name, -1 if value is None else values[value]) for name, value in operands.inputs],
            [(name, index_of(operand)) for name, operand in operands.weights],
            operands.ints,
            operands.floats,
            [(name, [index_of(operand) for operand in elements]) for name, elements in operands.tuples],
            (-1, 0) if kv is None else layout.place(kv.layer),
            _padded(cache.elements_per_sequence) if isinstance(cache, StateCache) else 0,
        )
    return indices
