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
    """The largest step an executor must be able to run; its workspace is planned from this.

    max_logits_rows: of max_num_outputs, the rows whose logits may be held at once. A backend with a native program
    computes and samples more of them in turns, or None if it holds all.
    further_rows: of the domains of the graph beside tokens and outputs, the largest number of rows.
    adapters: those that it can hold, or None if the graph takes none.
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
        """The maximum rows of each kind of value in a step."""
        outputs = self.max_num_outputs
        logits = outputs if self.max_logits_rows is None else min(outputs, self.max_logits_rows)
        adapters = {} if self.adapters is None else {ADAPTERS: self.adapters.slots}
        tokens = self.max_num_batched_tokens
        return {TOKENS: tokens, OUTPUTS: outputs, LOGITS: logits, **adapters, **self.further_rows}


KeepJob: TypeAlias = Callable[[Callable[[], bool]], None]
"""Writes packed weights for the next start. It asks its argument whether to give up."""


@dataclass(frozen=True, slots=True)
class PackCacheOptions:
    """Options for keeping packed weights on disk for the next start.

    identity: identifies the content of the model's files.
    limit_bytes: limit of all models together.
    resident_bytes: of a model larger than memory, the bytes that may stay in memory; None means all of them may.
    later: gets the job of writing what was packed, if it is not there yet, or None if it is written before the model
    starts, which maps it.
    """

    identity: str
    limit_bytes: int
    resident_bytes: int | None = None
    later: list[KeepJob] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Paging:
    """A model larger than memory, which runs from its mapped weights.

    memory_bytes: that the matrices may take.
    resident_bytes: of those that stay in memory.
    resident_layers: layers that are never read again from the disk.
    bytes_per_token: read from the disk for one token.
    bytes_per_s: of the disk, measured.
    """

    path: Path
    memory_bytes: int
    resident_bytes: int
    resident_layers: int
    bytes_per_token: int
    bytes_per_s: float

    @property
    def tokens_per_s(self) -> float:
        """The most tokens per second of a single sequence."""
        return self.bytes_per_s / max(self.bytes_per_token, 1)


class PendingStep(Protocol):
    """A step that an executor has accepted and may still be running."""

    def wait(self) -> StepOutput:
        """Return the step's output when it is done; other Python threads run meanwhile. May be called again.

        Raises SamplingError for rows without an outcome, and RuntimeError if the step failed.
        """


def check_model_len(graph: Graph, limits: ExecutorLimits) -> None:
    """Raise UsageError if a sequence could have more tokens than the model has learned positions."""
    positions = graph.max_positions
    if positions is not None and limits.max_model_len > positions:
        raise UsageError(
            f"max_model_len {limits.max_model_len} is more than the {positions} positions that the model has learned; "
            f"give at most {positions}"
        )


def refuse_fp8_cache(kv_dtype: KVDtype | None, backend: str) -> None:
    """Raise UsageError for the type of a cache that only a GPU has."""
    if kv_dtype == "fp8":
        raise UsageError(f"kv_dtype fp8 is for a GPU; the backend {backend} has float16 and int8, which is more exact")


def check_token_types(graph: Graph, batch: Batch) -> None:
    """Raise UsageError for a token of a type that the model does not have."""
    if batch.token_types is None or not len(batch.token_types):
        return
    low, high = int(batch.token_types.min()), int(batch.token_types.max())
    for node in graph.nodes:
        if node.op.name == "token_type_embedding" and not 0 <= low <= high < node.op.parameters[0].shape[0]:
            raise UsageError(f"token types are {low} to {high}; this model has {node.op.parameters[0].shape[0]}")


class FinishedStep:
    """A `PendingStep` of an executor that computes on the calling thread: done before it is returned."""

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
    """A compiled graph with its weights, its workspace and its paged cache."""

    # Steps that run or are queued at once; one more `submit` blocks until there is room. Above 1, a step may take its
    # tokens from the one before: `Batch.token_sources`. May change with each step.
    max_in_flight: int
    settles_drafts: bool  # takes `Batch.late`
    num_stages: int  # of a pipeline, which computes so many steps of different sequences at the same time
    cache_sizes: CacheSizes  # groups of layers with block tables of their own, and bytes of a token in them
    workspace_bytes: int  # activations and scratch at the limits
    weight_bytes: int  # packed weights
    mapped_bytes: int  # the part of `weight_bytes` in mapped files, which the system counts as reclaimable memory
    num_threads: int  # for computing
    paging: Paging | None  # None means all weights stay in memory

    def allocate_cache(self, num_blocks: int, block_size: int, num_states: int = 0) -> None:
        """Allocate the paged cache, and `num_states` slots for the states of sequences, once, before the first step."""

    def submit(self, batch: Batch) -> PendingStep:
        """Start one step and return. The step makes its copies of blocks and states, computes, and samples.

        The hidden states of `hidden_indices` come with it; without logits it ends before the output head. A segment
        without logits returns its outputs as `StepOutput.values`. The step reads the batch while it runs: its arrays
        must not change before `wait` has returned. Steps run in the order of their calls.
        Raises ValueError or UsageError for a batch with invalid arrays or numbers, before anything runs.
        """

    def close(self) -> None:
        """Free weights, workspace, cache and threads, once no step runs. May be called twice."""


@runtime_checkable
class SleepingExecutor(Protocol):
    """An executor on a device of its own, whose memory it can give back for a while."""

    def sleep(self) -> None:
        """Keep the weights in main memory. Blocks and states lose their content. Between steps."""

    def wake_up(self) -> None:
        """Have everything on the device again, the weights to the last bit. Raises InsufficientMemoryError."""


@runtime_checkable
class PartExecutor(Protocol):
    """An executor that computes a step without logits and caches in parts, between which others run on its threads."""

    num_operations: int  # of a step

    def submit_part(self, batch: Batch, begin: int, end: int) -> PendingStep:
        """As `submit`, but only operations [begin, end), after those before them of the same batch.

        `StepOutput.values` come with the last of them.
        Raises ValueError for a part that does not exist.
        """


@runtime_checkable
class BorrowingExecutor(Protocol):
    """An executor of a graph that reads the caches of another one (`octavo.graph.builder.Graph.borrow`)."""

    def borrow_cache(self, other: Executor) -> None:
        """Read the cache that `other` has allocated, instead of `allocate_cache`. Steps of both never run together.

        Raises UsageError if the cache is not where this executor could read it.
        """


@runtime_checkable
class GuessingExecutor(Protocol):
    """An executor of a draft model that can leave its guesses on the device of the model that computes them."""

    def share_tokens(self, other: Executor, target_ids: Int32 | None, bias: Float32 | None) -> bool:
        """Leave guesses where `other` takes its tokens from (`Batch.guesses_at`). Before `allocate_cache`.

        target_ids: of its tokens, those of `other`; None means the same.
        bias: that the first of two inputs brings into hidden states, and that is taken off its own. Return False if it
        cannot, and its guesses are in `StepOutput` alone.
        """


@runtime_checkable
class AdaptingExecutor(Protocol):
    """An executor that holds adapters in slots, whose numbers `Batch.domains` has for each token (ADAPTER_SLOTS)."""

    def prepare_adapter(self, parts: Mapping[str, LowRank]) -> object:
        """The parts of an adapter, by the names of their weights, in the form in which steps read them.

        From any thread: the work of loading is here.
        Raises GraphError for a rank above the limit.
        """

    def load_adapter(self, slot: int, prepared: object) -> None:
        """Put a prepared adapter into a slot. Between steps; it takes no longer than a step's preparation."""

    def drop_adapter(self, slot: int) -> None:
        """Empty a slot. Between steps."""


class RankGroup(Protocol):
    """The ranks that compute parts of the same layers, and exchange values in the middle of a step.

    All of them take part in sampling, and need `Batch.sampling`.
    """

    @property
    def error(self) -> str:
        """The reason why steps of the group fail, empty if they do not."""

    @property
    def is_waiting(self) -> bool:
        """True while this rank waits for another one in the middle of a step. From any thread."""

    def fail(self, reason: str) -> None:
        """End the running step of all ranks with an error, and every later one. From any thread."""

    @property
    def compile(self) -> Callable[..., Executor]:
        """As `Backend.compile`, for the graph of this rank."""


@dataclass(frozen=True, slots=True)
class BackendDescription:
    """A description of a backend on this machine, for people.

    kernels: the kernels that it runs, `avx512` for example.
    reason: the reason for these.
    thread_reasons: the reasons for the number of threads, one line each.
    problems: reasons why it cannot run as configured.
    products: the type in which products with quantized weights are computed.
    libraries: those that may take the place of its kernels, a line each, with the reason against a library that cannot.
    """

    kernels: str
    reason: str
    num_threads: int
    thread_reasons: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    products: str = "float32"
    libraries: tuple[str, ...] = ()


class Backend(Protocol):
    """A module under `octavo.backends` with these functions."""

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
        """Compile `graph` once. num_threads 0: one for each core that this process may use.

        graph: or the result of `sizes` with the same arguments, so that its work is not done again.
        progress: called with (phase, bytes loaded, bytes in all) while weights are packed.
        pack_cache: None: packed weights are not kept; a backend that packs nothing keeps nothing.
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
        """The memory that `compile` would take with the same arguments. It reads no matrix."""

    def expected_paging(
        self, sizes: Sizes, weights: Mapping[str, Weight], pack_cache: PackCacheOptions, sample: Path
    ) -> Paging:
        """The paging that `compile` would choose with the same arguments; only with `PAGES_WEIGHTS`.

        The rate of the disk is measured: of the packed weights or, while there are none, of the file `sample`.
        """

    def join_group(
        self, name: str, rank: int, size: int, buffer_bytes: int, given_up: Callable[[], str] | None = None
    ) -> RankGroup:
        """The group of that name, once all of its ranks have come.

        buffer_bytes: at least a row of the widest value.
        given_up: asked meanwhile for a reason to wait no longer, or an empty text.
        Raises EngineDeadError with that reason or if a rank does not come, and UsageError if the backend has no groups.
        """

    def memory(self) -> MemoryBudget:
        """The free memory of this backend's device."""

    def describe(self) -> BackendDescription:
        """A description of this backend on the machine."""


class _MayFindGPU(Protocol):
    finds_gpu: bool


@cache
def default_backend() -> str:
    """`torch` if it is installed and finds a GPU, else `cpu`.

    Torch takes seconds to import, and is asked only where the system has a GPU's driver.
    """
    if importlib.util.find_spec("torch") is None or not any(Path(path).exists() for path in _GPU_DRIVERS):
        return "cpu"
    try:
        return "torch" if cast(_MayFindGPU, get_backend("torch")).finds_gpu else "cpu"
    except (UsageError, ImportError, OSError, RuntimeError) as error:  # a broken torch, or its driver
        logger.warning("the GPU is not used: torch cannot be loaded (%s: %s)", type(error).__name__, error)
        return "cpu"


def get_backend(name: str) -> Backend:
    """The backend of that name, `torch:DEVICE` on one device. Raises UsageError if there is none."""
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
        raise UsageError(f"there is no backend {found!r}; leave it out, or take 'cpu', 'torch' or 'reference'")
    return cast(Backend, backend)
