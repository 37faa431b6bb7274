"""Turns a graph into a native program: values into places in the workspace, operations into records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from octavo import env
from octavo.backends.cpu import _native
from octavo.backends.cpu.executor import CpuExecutor
from octavo.backends.cpu.lowering import PASSES, WeightOperand, lower
from octavo.backends.cpu.sizes import ELEMENT_BYTES, cache_sizes, kv_formats
from octavo.backends.cpu.threads import ThreadPlan, plan_threads
from octavo.backends.cpu.weights import load_matrices, plain_weight
from octavo.backends.sizes import Sizes
from octavo.errors import GraphError, UsageError
from octavo.graph.builder import Graph, Node
from octavo.graph.layer_formats import LayerFormat
from octavo.graph.memory_plan import plan
from octavo.graph.ops import Input
from octavo.graph.passes import optimize
from octavo.graph.values import Parameter, Rows

if TYPE_CHECKING:
    from octavo.backends import ExecutorLimits, PackCacheOptions
    from octavo.config import KVDtype, LoadProgress
    from octavo.quantization.packed import Weight

_ROW_SYMBOLS = {Rows.TOKENS: 0, Rows.OUTPUTS: 1}


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """Options for tests and measurements; users have OCTAVO_ISA and OCTAVO_NUM_THREADS.

    isa: the instruction set to use; None: the widest, limited by OCTAVO_ISA.
    optimized: the graph is rewritten into fused operations first.
    checked: outputs are poisoned first and must be finite afterwards, memory is guarded (slow).
    """

    isa: str | None = None
    optimized: bool = True
    checked: bool = False


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
    if isinstance(graph, Sizes):
        formats, graph = graph.kv_formats, graph.graph
    else:
        graph = optimize(graph, PASSES) if options.optimized else graph
        formats = kv_formats(graph, weights, kv_dtype)
    _check_kernels(graph)
    threads = plan_threads(num_threads)
    program = _make_program(graph, limits, isa, threads, checked=options.checked)
    # The step itself fills the values of inputs.
    computed = [node for node in graph.nodes if not isinstance(node.op, Input)]
    matrices = [p for node in computed for p in node.op.parameters if len(p.shape) > 1]
    packed = load_matrices(weights, matrices, threads.count, progress, pack_cache)
    recorder = _Recorder(program, graph, weights, formats, packed)
    for node in computed:
        recorder.add(node)
    program.finish()
    weight_bytes = {p: 4 * p.shape[0] for p in graph.parameters if len(p.shape) == 1}
    weight_bytes |= {p: weight.nbytes for p, weight in packed.items()}
    mapped_bytes = sum(weight.nbytes for weight in packed.values() if weight.is_view)
    sizes = cache_sizes(graph, formats)
    return CpuExecutor(program, graph, weight_bytes, mapped_bytes, sizes, isa, threads.count)


def choose_isa(isa: str | None = None) -> str:
    """The instruction set of the kernels: `isa`, else OCTAVO_ISA, and never more than the machine has.

    Raises UsageError for an unknown one.
    """
    known = _native.known_isas()
    cap = isa or env.max_instruction_set() or known[-1]
    if cap not in known:
        raise UsageError(f"instruction set {cap!r} is unknown; known are {', '.join(known)}")
    return min(cap, _native.detected_isa(), key=known.index)


def _check_kernels(graph: Graph) -> None:
    known = set(_native.kernel_names())
    for node in graph.nodes:
        if node.op.name not in known and not isinstance(node.op, Input):
            raise GraphError(f"{node.layer}: {node.op.name}: the cpu backend has no kernel for this operation")


def _make_program(
    graph: Graph, limits: ExecutorLimits, isa: str, threads: ThreadPlan, *, checked: bool
) -> _native.Program:
    """A program without operations, with the values of the graph in the order of its nodes."""
    memory = plan(graph, limits.rows, ELEMENT_BYTES)
    values = [node.output for node in graph.nodes]
    # The limit of token ids in a batch: the rows of the embedding.
    tables = [p.shape[0] for node in graph.nodes if node.op.name == "embedding" for p in node.op.parameters]
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
        [(memory.offsets[value.id], value.cols, _ROW_SYMBOLS[value.rows]) for value in values],
        memory.total_bytes,
        checked=checked,
    )


class _Recorder:
    """Adds operations to a program, with the program's index of each value and weight."""

    def __init__(
        self,
        program: _native.Program,
        graph: Graph,
        weights: Mapping[str, Weight],
        formats: Mapping[int, LayerFormat],
        packed: Mapping[Parameter, _native.PackedWeight],
    ) -> None:
        self._program = program
        self._weights = weights
        self._formats = formats
        self._layout = graph.cache_layout
        self._values = {node.output: index for index, node in enumerate(graph.nodes)}
        self._indices: dict[WeightOperand, int] = {p: program.add_packed_weight(weight) for p, weight in packed.items()}
        self._indices[None] = -1

    def add(self, node: Node) -> None:
        cache = node.op.cache
        operands = lower(node.op, None if cache is None else self._formats[cache.layer])
        self._program.add_record(
            node.op.name,
            f"{node.layer}: {node.op.name}",
            self._values[node.output],
            [(name, -1 if value is None else self._values[value]) for name, value in operands.inputs],
            [(name, self._weight(operand)) for name, operand in operands.weights],
            operands.ints,
            operands.floats,
            [(name, [self._weight(operand) for operand in elements]) for name, elements in operands.tuples],
            (-1, 0) if cache is None else self._layout.place(cache.layer),
        )

    def _weight(self, operand: WeightOperand) -> int:
        """The index of a packed matrix, or of a vector, which is added when it is first used."""
        if operand not in self._indices:
            if isinstance(operand, Parameter):
                array = plain_weight(self._weights, operand)
            else:
                array = np.array(operand, np.float32)
            self._indices[operand] = self._program.add_plain_weight(array)
        return self._indices[operand]
