"""The interface between the engine and a backend. A backend is a folder or file here, found by its name."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast, runtime_checkable

from octavo.errors import UsageError
from octavo.graph.ops.low_rank import ADAPTERS, AdapterLimits, LowRank
from octavo.graph.values import LOGITS, OUTPUTS, TOKENS, RowDomain

if TYPE_CHECKING:
    from octavo.backends.memory import MemoryBudget, Sizes
    from octavo.batch import Batch, Float32, Int32, StepOutput
    from octavo.config import KVDtype, LoadProgress
    from octavo.graph.builder import Graph
    from octavo.graph.cache import CacheSizes
    from octavo.quantization.packed import Weight


logger = logging.getLogger(__name__)

_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA, AMD, and Windows' of its Linux
PACKING, CHECKING = "packing", "checking"  # phases of a load: from the checkpoint, or from the pack cache


@dataclass(frozen=True, slots=True)
class ExecutorLimits:
    """The largest step that an executor must be able to run; its workspace is planned from these limits.

    max_logits_rows: how many of the max_num_outputs rows may have logits in memory at once; None means all of them. A
    backend with a native program computes and samples any further rows in several passes.
    further_rows: maximum rows of each of the graph's domains other than tokens and outputs.
    adapters: limits of the adapters, or None if the graph takes none.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_num_outputs: int
    max_model_len: int
    max_logits_rows: int | None = None
    further_rows: Mapping[RowDomain, int] = field(default_factory=dict, hash=False)
    adapters: AdapterLimits | None = None

    @property
    def rows(self) -> dict[RowDomain, int]:
        """The maximum number of rows in a step, by row domain."""
        outputs = self.max_num_outputs
        logits = outputs if self.max_logits_rows is None else min(outputs, self.max_logits_rows)
        adapters = {} if self.adapters is None else {ADAPTERS: self.adapters.slots}
        tokens = self.max_num_batched_tokens
        return {TOKENS: tokens, OUTPUTS: outputs, LOGITS: logits, **adapters, **self.further_rows}


KeepJob: TypeAlias = Callable[[Callable[[], bool]], None]
"""Writes packed weights for the next start. It calls its argument to find out whether to give up."""


@dataclass(frozen=True, slots=True)
class PackCacheOptions:
    """Options for keeping packed weights on disk for the next start.

    identity: identifies the content of the model's files.
    limit_bytes: limit for all models together.
    resident_bytes: for a model larger than memory, how many bytes may stay in memory; None means no limit.
    later: list that receives the job of writing newly packed weights. None means that the weights are written before
    the model starts, and that the model maps the file.
    """

    identity: str
    limit_bytes: int
    resident_bytes: int | None = None
    later: list[KeepJob] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Paging:
    """The plan for a model that is larger than memory and runs from its mapped weights.

    memory_bytes: memory that the matrices may use.
    resident_bytes: size of the matrices that stay in memory.
    resident_layers: number of layers that are never read from disk again.
    bytes_per_token: bytes read from disk for one token.
    bytes_per_s: measured read rate of the disk.
    """

    path: Path
    memory_bytes: int
    resident_bytes: int
    resident_layers: int
    bytes_per_token: int
    bytes_per_s: float

    @property
    def tokens_per_s(self) -> float:
        """The highest rate at which a single sequence can be generated, in tokens per second."""
        return self.bytes_per_s / max(self.bytes_per_token, 1)


class PendingStep(Protocol):
    """A step that an executor has accepted and may still be running."""

    def wait(self) -> StepOutput:
        """Return the step's output when it is done; other Python threads run meanwhile. May be called again.

        Raises SamplingError if no token can be chosen for some rows, and RuntimeError if the step failed.
        """


def check_model_len(graph: Graph, limits: ExecutorLimits) -> None:
    """Raise UsageError if a sequence could have more tokens than the model's table of learned positions covers."""
    positions = graph.max_positions
    if positions is not None and limits.max_model_len > positions:
        raise UsageError(
            f"max_model_len {limits.max_model_len} is more than the {positions} positions that the model has learned; "
            f"give at most {positions}"
        )


def refuse_fp8_cache(kv_dtype: KVDtype | None, backend: str) -> None:
    """Raise UsageError for fp8, a cache type that only a GPU supports."""
    if kv_dtype == "fp8":
        raise UsageError(f"kv_dtype fp8 needs a GPU; {backend} supports float16 and int8, which is more exact")


def check_token_types(graph: Graph, batch: Batch) -> None:
    """Raise UsageError if the batch has a token type that the model lacks."""
    if batch.token_types is None or not len(batch.token_types):
        return
    low, high = int(batch.token_types.min()), int(batch.token_types.max())
    for node in graph.nodes:
        if node.op.name == "token_type_embedding" and not 0 <= low <= high < node.op.parameters[0].shape[0]:
            raise UsageError(f"token types range from {low} to {high}; this model has {node.op.parameters[0].shape[0]}")


class FinishedStep:
    """The `PendingStep` of an executor that computes on the calling thread: it is complete when it is returned."""

    def __init__(self, compute: Callable[[], StepOutput]) -> None:
        """Call `compute`; `wait` returns its result or raises its exception."""
        self._result: StepOutput | Exception
        try:
            self._result = compute()
        except Exception as error:
            self._result = error

    def wait(self) -> StepOutput:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


class Executor(Protocol):
    """A compiled graph with its weights, workspace and paged cache."""

    # Steps that run or are queued at once; one more `submit` blocks until there is room. Above 1, a step may take its
    # tokens from the one before: `Batch.token_sources`. May change with each step.
    max_in_flight: int
    settles_drafts: bool  # takes `Batch.late`
    num_stages: int  # pipeline stages: this many steps of different sequences run at the same time
    cache_sizes: CacheSizes  # groups of layers with block tables of their own, and bytes of a token in them
    workspace_bytes: int  # activations and scratch at the limits
    weight_bytes: int  # packed weights
    mapped_bytes: int  # the part of `weight_bytes` in mapped files, which the system counts as reclaimable memory
    num_threads: int  # for computing
    paging: Paging | None  # None means all weights stay in memory

    def allocate_cache(self, num_blocks: int, block_size: int, num_states: int = 0) -> None:
        """Allocate the paged cache and `num_states` slots for sequence states. Call once, before the first step."""

    def submit(self, batch: Batch) -> PendingStep:
        """Start one step and return. The step copies blocks and states, computes, and samples.

        The output includes the hidden states of `hidden_indices`. A step without logits ends before the output head. If
        the graph is a segment that makes no logits, its outputs are returned as `StepOutput.values`. The step reads the
        batch while it runs, so the batch's arrays must not change before `wait` has returned. Steps run in the order in
        which they were submitted.
        Raises ValueError or UsageError for a batch with invalid arrays or numbers, before anything runs.
        """

    def close(self) -> None:
        """Free weights, workspace, cache and threads once no step is running. May be called twice."""


@runtime_checkable
class SleepingExecutor(Protocol):
    """An executor on a separate device that can release the device's memory for a while."""

    def sleep(self) -> None:
        """Move the weights to main memory and discard the contents of blocks and states. Call between steps."""

    def wake_up(self) -> None:
        """Move everything back to the device, with the weights unchanged. Raises InsufficientMemoryError."""


@runtime_checkable
class PartExecutor(Protocol):
    """An executor that can compute a step without logits and caches in parts, so that other executors can use its
    threads in between.
    """

    num_operations: int  # per step

    def submit_part(self, batch: Batch, begin: int, end: int) -> PendingStep:
        """Start operations [begin, end) of a step, after all earlier operations of the same batch. See `submit`.

        Only the last part returns `StepOutput.values`.
        Raises ValueError for a part that does not exist.
        """


@runtime_checkable
class BorrowingExecutor(Protocol):
    """An executor of a graph that reads the caches of another graph (`octavo.graph.builder.Graph.borrow`)."""

    def borrow_cache(self, other: Executor) -> None:
        """Use the cache that `other` has allocated, instead of calling `allocate_cache`.

        Steps of the two executors never overlap.

        Raises UsageError if this executor cannot read the cache where it is.
        """


@runtime_checkable
class GuessingExecutor(Protocol):
    """An executor of a draft model that can leave its draft tokens on the device where the target model reads them."""

    def share_tokens(self, other: Executor, target_ids: Int32 | None, bias: Float32 | None) -> bool:
        """Leave draft tokens where `other` takes its tokens from (`Batch.guesses_at`). Call before `allocate_cache`.

        target_ids: token id in `other` for each token id of this model; None means that the ids are the same.
        bias: bias that this model adds to the hidden states it reads, although it is meant only for the target's. It is
        subtracted beforehand from hidden states that this model produced. None means that there is no bias.
        Return False if tokens cannot be shared; draft tokens are then only in `StepOutput`.
        """


@runtime_checkable
class AdaptingExecutor(Protocol):
    """An executor that holds adapters in slots. `Batch.domains` gives the slot number of each token (ADAPTER_SLOTS)."""

    def prepare_adapter(self, parts: Mapping[str, LowRank]) -> object:
        """Convert the parts of an adapter, keyed by weight name, to the form that steps read.

        Does the main work of loading, and may be called from any thread.
        Raises GraphError for a rank above the limit.
        """

    def load_adapter(self, slot: int, prepared: object) -> None:
        """Put a prepared adapter into a slot. Call between steps; this takes no longer than preparing a step."""

    def drop_adapter(self, slot: int) -> None:
        """Empty a slot. Call between steps."""


class RankGroup(Protocol):
    """The ranks that compute parts of the same layers and exchange values during a step.

    All ranks take part in sampling and need `Batch.sampling`.
    """

    @property
    def error(self) -> str:
        """The reason why the group's steps fail; empty if they do not."""

    @property
    def is_waiting(self) -> bool:
        """True while this rank waits for another rank during a step. May be called from any thread."""

    def fail(self, reason: str) -> None:
        """Make the running step of all ranks and every later step fail with an error. May be called from any thread."""

    @property
    def compile(self) -> Callable[..., Executor]:
        """Compile this rank's graph. See `Backend.compile`."""


@dataclass(frozen=True, slots=True)
class BackendDescription:
    """A human-readable description of a backend on this machine.

    kernels: the kernels that it runs, for example `avx512`.
    reason: why it runs these kernels.
    thread_reasons: explanations of the number of threads, one line each.
    problems: reasons why it cannot run as configured.
    products: the number type in which products with quantized weights are computed.
    libraries: libraries that can replace its kernels, one line each, with the reason if one cannot be used.
    """

    kernels: str
    reason: str
    num_threads: int
    thread_reasons: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    products: str = "float32"
    libraries: tuple[str, ...] = ()


class Backend(Protocol):
    """The interface that a module under `octavo.backends` implements."""

    PAGES_WEIGHTS: bool  # a model larger than memory can run, with `PackCacheOptions.resident_bytes`

    def compile(
        self,
        graph: Graph | Sizes,
        weights: Mapping[str, Weight],
        limits: ExecutorLimits,
        *,
        num_threads: int = 0,
        progress: LoadProgress | None = None,
        pack_cache: PackCacheOptions | None = None,
        kv_dtype: KVDtype = "float16",
    ) -> Executor:
        """Compile `graph` once. num_threads 0 means one thread for each core that this process may use.

        graph: a graph, or the result of `sizes` with the same arguments, which saves repeating that work.
        progress: called with (phase, bytes loaded, total bytes) while weights are packed.
        pack_cache: None means that packed weights are not kept; a backend that packs nothing ignores it.
        kv_dtype: number type of the paged cache.
        Raises GraphError naming an operation that the backend lacks, and InsufficientMemoryError if weights beyond
        `resident_bytes` cannot be kept on disk.
        """

    def sizes(
        self,
        graph: Graph,
        weights: Mapping[str, Weight],
        limits: ExecutorLimits,
        *,
        num_threads: int = 0,
        kv_dtype: KVDtype = "float16",
    ) -> Sizes:
        """Return the memory that `compile` would take with the same arguments. Reads no matrices."""

    def expected_paging(
        self, sizes: Sizes, weights: Mapping[str, Weight], pack_cache: PackCacheOptions, sample: Path
    ) -> Paging:
        """Return the paging that `compile` would choose with the same arguments. Only called if `PAGES_WEIGHTS`.

        The disk's read rate is measured on the packed weights, or on the file `sample` if there are none yet.
        """

    def join_group(
        self, name: str, rank: int, size: int, buffer_bytes: int, given_up: Callable[[], str] | None = None
    ) -> RankGroup:
        """Join the group called `name` and return it when all ranks have joined.

        buffer_bytes: size of the buffer for exchanged values, at least one row of the widest value.
        given_up: called while waiting; returns a reason to stop waiting, or an empty string.
        Raises EngineDeadError with that reason, or if a rank does not join. Raises UsageError if the backend does not
        support groups.
        """

    def memory(self) -> MemoryBudget:
        """Return the free memory of this backend's device."""

    def describe(self) -> BackendDescription:
        """Describe this backend on this machine."""


class _MayFindGPU(Protocol):
    finds_gpu: bool


@cache
def default_backend() -> str:
    """Return `torch` if it is installed and finds a GPU, else `cpu`.

    Torch takes seconds to import, so it is tried only if the system has a GPU driver.
    """
    if importlib.util.find_spec("torch") is None or not any(Path(path).exists() for path in _GPU_DRIVERS):
        return "cpu"
    try:
        return "torch" if cast(_MayFindGPU, get_backend("torch")).finds_gpu else "cpu"
    except (UsageError, ImportError, OSError, RuntimeError) as error:  # a broken torch, or its driver
        logger.warning("the GPU is not used: torch cannot be loaded (%s: %s)", type(error).__name__, error)
        return "cpu"


def get_backend(name: str) -> Backend:
    """Return the backend called `name`; `torch:DEVICE` selects a device. Raises UsageError if there is none."""
    name, _, device = name.partition(":")
    is_here = any(module.name == name for module in pkgutil.iter_modules(__path__))
    try:
        backend = importlib.import_module(f"octavo.backends.{name}") if is_here else None
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UsageError("the backend 'torch' needs torch: pip install 'octavo[gpu]'") from None
    if backend is not None and hasattr(backend, "on_device"):
        return cast(Backend, backend.on_device(device or None))
    if not hasattr(backend, "compile") or device:
        found = f"{name}:{device}" if device else name
        raise UsageError(f"there is no backend {found!r}; use 'cpu', 'torch' or 'reference', or leave it out")
    return cast(Backend, backend)
