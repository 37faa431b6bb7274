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
from octavo.graph.values import Parameter, Rows, Value

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
    return _Compiler(graph, weights, formats, limits, isa, threads, options).run(progress, pack_cache)


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


class _Compiler:
    """The state of one compilation: the program's index of each value, weight and cache."""

    def __init__(
        self,
        graph: Graph,
        weights: Mapping[str, Weight],
        formats: Mapping[int, LayerFormat],
        limits: ExecutorLimits,
        isa: str,
        threads: ThreadPlan,
        options: CompileOptions,
    ) -> None:
        self._graph = graph
        self._weights = weights
        self._isa = isa
        self._threads = threads
        self._values: dict[Value, int] = {}
        self._plain: dict[Parameter | tuple[float, ...], int] = {}
        self._layout = graph.cache_layout
        self._matrices: dict[Parameter, int] = {}
        self._formats = formats
        self._program = self._make_program(limits, options)

    def run(self, progress: LoadProgress | None, pack_cache: PackCacheOptions | None) -> CpuExecutor:
        # The step itself fills the values of inputs.
        computed = [node for node in self._graph.nodes if not isinstance(node.op, Input)]
        matrices = [p for node in computed for p in node.op.parameters if len(p.shape) > 1]
        packed = load_matrices(self._weights, matrices, self._threads.count, progress, pack_cache)
        self._matrices = {p: self._program.add_packed_weight(weight) for p, weight in packed.items()}
        for node in computed:
            self._add_record(node)
        self._program.finish()
        weight_bytes = {p: 4 * p.shape[0] for p in self._graph.parameters if len(p.shape) == 1}
        weight_bytes |= {p: weight.nbytes for p, weight in packed.items()}
        mapped_bytes = sum(weight.nbytes for weight in packed.values() if weight.is_view)
        return CpuExecutor(
            self._program,
            self._graph,
            weight_bytes,
            mapped_bytes,
            cache_sizes(self._graph, self._formats),
            self._isa,
            self._threads.count,
        )

    def _make_program(self, limits: ExecutorLimits, options: CompileOptions) -> _native.Program:
        memory = plan(self._graph, limits.rows, ELEMENT_BYTES)
        places: list[tuple[int, int, int]] = []
        for node in self._graph.nodes:
            self._values[node.output] = len(places)
            places.append((memory.offsets[node.output.id], node.output.cols, _ROW_SYMBOLS[node.output.rows]))
        return _native.Program(
            self._isa,
            self._threads.count,
            self._threads.spin_us,
            (
                limits.max_num_batched_tokens,
                limits.max_num_seqs,
                limits.max_num_outputs,
                limits.max_model_len,
                self._vocab_size(),
            ),
            places,
            memory.total_bytes,
            checked=options.checked,
        )

    def _vocab_size(self) -> int:
        """The limit of token ids in a batch: the rows of the embedding."""
        tables = [p.shape[0] for n in self._graph.nodes if n.op.name == "embedding" for p in n.op.parameters]
        return min(tables, default=np.iinfo(np.int32).max)

    def _add_record(self, node: Node) -> None:
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
        if operand is None:
            return -1
        if isinstance(operand, Parameter) and len(operand.shape) > 1:
            return self._matrices[operand]
        if operand not in self._plain:
            if isinstance(operand, Parameter):
                array = plain_weight(self._weights, operand)
            else:
                array = np.array(operand, np.float32)
            self._plain[operand] = self._program.add_plain_weight(array)
        return self._plain[operand]
