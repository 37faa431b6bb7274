"""A compiled graph on the CPU; each step is one native call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from octavo.backends.cpu.adapters import PreparedPart, prepare
from octavo.backends.cpu.ceilings import measure_kernel_ceilings
from octavo.backends.cpu.row_numbers import RowNumbers
from octavo.backends.profiling import Ceilings, RecordTime
from octavo.backends.sampling import raise_row_errors
from octavo.batch import StepOutput
from octavo.errors import EngineDeadError, UsageError
from octavo.graph.cost import Cost, node_cost
from octavo.graph.domain_rows import domain_rows
from octavo.graph.domains import check_names
from octavo.graph.ops.low_rank import BesideWeights
from octavo.graph.ops.stages import BORDERS, Send
from octavo.graph.segments import check_inputs

if TYPE_CHECKING:
    from octavo.backends import Executor, Paging
    from octavo.backends.cpu import _native
    from octavo.batch import Batch, Float32, Int32
    from octavo.graph.builder import Graph
    from octavo.graph.cache import CacheSizes
    from octavo.graph.ops.base import StepSizes
    from octavo.graph.ops.low_rank import LowRank
    from octavo.graph.values import Parameter, Value


SHORT_STEP_S = 0.01  # the time between two steps is 0.1 ms, which hardly counts for longer ones
_BYTES_OF_FLOATS = 1.5  # a weight of fewer bytes than this is quantized: its products are integers

_Arrays = list[tuple[int, "Float32"]]  # values of the program
_NONE: _Arrays = []


class CpuPendingStep:
    """Implements `octavo.backends.PendingStep`. Holds the batch and the output while native threads use them."""

    def __init__(
        self,
        step: _native.PendingStep,
        output: StepOutput,
        errors: Int32,
        on_end: Callable[[float], None],
        guard: _native.MappingGuard | None = None,
    ) -> None:
        """errors: [R], written by the step: the reason why a row has no outcome.
        on_end: called with the step's duration in seconds by the thread that waits for it.
        guard: guards mapped weights.
        """
        self._on_end = on_end
        self._guard = guard
        self._step = step
        self._output = output
        self._errors = errors

    def wait(self) -> StepOutput:
        self._step.wait()
        self._on_end(self._step.seconds)
        if self._guard is not None and self._guard.is_damaged:
            raise EngineDeadError(
                f"{self._guard.path}: the packed weights could not be read: the file was truncated, or the disk has an "
                "error. Start again: a damaged file is removed, and the weights are packed again"
            )
        raise_row_errors(self._errors)
        return self._output


class CpuExecutor:
    """Implements `octavo.backends.Executor`. Safe to share between threads: steps run one after another."""

    # 2 while steps are short: then the next one starts without Python. Beside a long one, what the engine does between
    # steps takes no time that counts, and a request that comes meanwhile would have to wait for both.
    max_in_flight = 1
    settles_drafts = False
    num_stages = 1

    def __init__(
        self,
        program: _native.Program,
        graph: Graph,
        weight_bytes: Mapping[Parameter, int],
        mapped_bytes: int,
        cache_sizes: CacheSizes,
        isa: str,
        num_threads: int,
    ) -> None:
        """The program's values are in the order of the graph's nodes.

        weight_bytes: packed size of each parameter.
        mapped_bytes: how many of these bytes are in a mapped file.
        """
        self._program = program
        self._graph = graph
        self._rows = RowNumbers.of(graph)
        self.domain_names: frozenset[str] = frozenset()  # domains of a batch, including other parts of a model
        self._values = {node.output: index for index, node in enumerate(graph.nodes)}
        self._values |= {node.output: self._values[node.op.x] for node in graph.nodes if isinstance(node.op, Send)}
        self._inputs = graph.inputs
        computed = [node.op for node in graph.nodes if not isinstance(node.op, BORDERS)]
        self._adapted_records = {i: op for i, op in enumerate(computed) if isinstance(op, BesideWeights)}
        self._is_segment = bool(graph.inputs) or not graph.makes_logits
        self._logits = self._values[graph.output] if graph.makes_logits else -1
        self._weight_bytes = weight_bytes
        self.weight_bytes = sum(weight_bytes.values())
        self.mapped_bytes = mapped_bytes
        self.cache_sizes = cache_sizes
        self.kv_element_bytes = cache_sizes.token_bytes / max(graph.kv_elements_per_token, 1)
        self.workspace_bytes = program.workspace_bytes
        self.isa = isa
        self.num_threads = num_threads
        self.paging: Paging | None = None
        # As `octavo.backends.cpu.compile`, for a graph that has some of these matrices, too: they are not packed again.
        self.compile_beside: Callable[..., CpuExecutor] | None = None
        self.guard: _native.MappingGuard | None = None  # guards mapped weights
        self._short_tokens = 0  # steps with at most this many tokens are short
        self._last_tokens: Int32 = np.zeros(0, np.int32)  # [R], those that the last step draws

    def prepare_adapter(self, parts: Mapping[str, LowRank]) -> list[PreparedPart]:
        """See `AdaptingExecutor`."""
        return prepare(self._adapted_records, parts)

    def load_adapter(self, slot: int, prepared: list[PreparedPart]) -> None:
        """See `AdaptingExecutor`."""
        self._program.set_adapter(slot, prepared)

    def drop_adapter(self, slot: int) -> None:
        """See `AdaptingExecutor`."""
        self._program.set_adapter(slot, [])

    def allocate_cache(self, num_blocks: int, block_size: int, num_states: int = 0) -> None:
        """See `Executor`. Raises UsageError if the kernels do not support `block_size`."""
        try:
            self._program.allocate_cache(num_blocks, block_size, num_states)
        except ValueError as error:
            raise UsageError(str(error)) from None

    def borrow_cache(self, other: Executor) -> None:
        """See `octavo.backends.BorrowingExecutor`."""
        if not isinstance(other, CpuExecutor):
            raise UsageError(
                "a draft_model that reads the model's cache must be on the same device; leave draft_model out"
            )
        self._program.borrow_cache(other._program)

    @property
    def num_operations(self) -> int:
        """See `octavo.backends.PartExecutor`."""
        return self._program.num_records

    def submit_part(self, batch: Batch, begin: int, end: int) -> CpuPendingStep:
        """See `octavo.backends.PartExecutor`."""
        return self._submit(batch, (begin, end))

    def submit(self, batch: Batch) -> CpuPendingStep:
        """See `Executor`."""
        return self._submit(batch, (0, -1))

    def _submit(self, batch: Batch, records: tuple[int, int]) -> CpuPendingStep:
        check_names(self.domain_names, batch)
        rows = len(batch.logits_indices)
        num_top = 0 if batch.sampling is None else max(batch.sampling.rows["num_logprobs"].tolist(), default=0)
        output = StepOutput.unsampled(rows, max(num_top, 0))
        errors = np.zeros(rows, np.int32)
        result, copies, inputs = self._logits, _NONE, _NONE
        if self._is_segment or batch.inputs or batch.return_logits or len(batch.hidden_indices):
            result, copies, inputs = self._transfers(batch, output)
        if records[0] > 0:
            inputs = _NONE  # the first part has read them, and their memory may be in use again
        if 0 <= records[1] < self.num_operations:
            copies, output.values = _NONE, ()
        earlier_tokens = None if batch.token_sources is None else self._last_tokens
        further = [(self._rows.domains[each], domain_rows(batch, each)) for each in self._rows.described]
        step = self._program.submit(batch, result, output, errors, copies, inputs, earlier_tokens, further, records)
        self._last_tokens, num_tokens = output.token_ids, len(batch.token_ids)
        self.max_in_flight = 2 if num_tokens <= self._short_tokens else 1
        return CpuPendingStep(step, output, errors, partial(self._observe, num_tokens), self.guard)

    def _observe(self, num_tokens: int, seconds: float) -> None:
        if self._is_segment or self.paging is not None:  # no step follows another one by itself
            return
        if seconds <= SHORT_STEP_S:
            self._short_tokens = max(self._short_tokens, num_tokens)
        else:
            self._short_tokens = min(self._short_tokens, num_tokens - 1)

    def _transfers(self, batch: Batch, output: StepOutput) -> tuple[int, _Arrays, _Arrays]:
        """Return the step's last value, the values to copy to `output`, and the values that the batch provides."""
        graph = self._graph
        check_inputs(self._inputs, graph.makes_logits, batch)
        inputs = [(self._values[value], array) for value, array in zip(self._inputs, batch.inputs, strict=True)]
        if not graph.makes_logits:
            output.values = tuple(_array(value, batch) for value in graph.outputs)
            copies = [(self._values[value], array) for value, array in zip(graph.outputs, output.values, strict=True)]
            return -1, copies, inputs
        count, has_hidden = len(batch.logits_indices), bool(len(batch.hidden_indices))
        wanted: dict[Value, Float32] = {}
        if batch.return_logits and (count or not has_hidden):
            value = graph.output
            wanted[value] = _array(value, batch)
            output.logits = wanted[value][:count]
        if has_hidden:
            value = graph.hidden_states
            wanted.setdefault(value, _array(value, batch))
            output.hidden_states = wanted[value][count:]
        if has_hidden and graph.tap is not None:
            value = graph.tap
            wanted.setdefault(value, _array(value, batch))
            output.taps = wanted[value][count:]
        last = graph.output if count or not has_hidden else graph.hidden_states
        return self._values[last], [(self._values[value], array) for value, array in wanted.items()], inputs

    def progress(self) -> int:
        """See `octavo.backends.work_done.WatchedExecutor`."""
        return self._program.progress

    def share_threads(self, other: CpuExecutor) -> None:
        """Compute on the threads of another executor, whose steps never overlap this executor's steps."""
        self._program.share_threads(other._program)

    def start_profile(self) -> None:
        """Time operations from now on, counting from zero. Raises RuntimeError if the executor is closed."""
        self._program.start_profile()

    def profile(self, sizes: StepSizes) -> list[RecordTime]:
        """Return the times of all operations in order, sampling last, with their cost in a step of `sizes`.

        Empty unless `start_profile` was called; nothing is timed in checked mode.
        """
        times = self._program.profile()
        if not times:
            return []
        costs = []
        for node in self._graph.nodes:
            if not isinstance(node.op, BORDERS):
                matrices = [p for p in node.op.parameters if p.is_matrix]
                is_quantized = any(self._weight_bytes[p] < _BYTES_OF_FLOATS * prod(p.shape) for p in matrices)
                cost, names = node_cost(node, sizes, self._weight_bytes), tuple(p.name for p in matrices)
                costs.append((cost, is_quantized and node.op.name != "embedding", names))
        logits = 4 * sizes.outputs * self._graph.output.cols if self._graph.makes_logits else 0
        costs.append((Cost(bytes_read=logits, activation_bytes=logits), False, ()))
        return [
            RecordTime(label, kernel, calls, nanoseconds / 1e9, busy / 1e9, *cost)
            for (label, kernel, calls, nanoseconds, busy), cost in zip(times, costs, strict=True)
        ]

    def measure_ceilings(self) -> Ceilings:
        """See `ProfiledExecutor`."""
        return measure_kernel_ceilings(self.isa, self.num_threads)

    def close(self) -> None:
        self._program.close()


def _array(value: Value, batch: Batch) -> Float32:
    return np.empty((domain_rows(batch, value.rows).count, value.cols), np.float32)
