"""A model in parts, on a device and on the CPU: their sizes, and their executors one after another in a step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol, cast

from octavo.backends import (
    AdaptingExecutor,
    Backend,
    BackendDescription,
    Executor,
    ExecutorLimits,
    Paging,
    SleepingExecutor,
)
from octavo.backends.memory import MemoryBudget, PackedType, Sizes, StreamedSizes
from octavo.backends.moved_blocks import MovedSizes, with_part
from octavo.backends.offload import OffloadRates, workload_name
from octavo.backends.parameters import parameter_info
from octavo.backends.placement import Placement, best_placement, least_streamed, parts_of, possible_layers, spread
from octavo.backends.rates import Rates, read_rate
from octavo.backends.work_done import WatchedExecutor
from octavo.errors import InsufficientMemoryError, UsageError
from octavo.graph.cache import CacheSizes

if TYPE_CHECKING:
    from pathlib import Path

    from octavo.backends import PackCacheOptions, PendingStep, RankGroup
    from octavo.batch import Batch, Float32, StepOutput
    from octavo.config import EngineConfig, KVDtype, LoadProgress
    from octavo.graph.builder import Graph
    from octavo.graph.ops.low_rank import LowRank
    from octavo.graph.values import Parameter, Value
    from octavo.quantization.packed import Weight

EXPERTS_FROM_DISK = (
    "the experts that the GPU has no room for are larger than main memory, and run from disk only with their whole "
    "layers: give gpu_layers 0 or more"
)
_ASSUMED_CONTEXT = 8192  # tokens of cache that the layers of a device leave room for, if nobody says how many


class Device(Backend, Protocol):
    """A backend whose memory may be smaller than a model."""

    @property
    def uses_main_memory(self) -> bool:
        """True for a device in tests, whose tensors are where the CPU's are."""

    def total_memory(self) -> int:
        """The bytes of the device's memory."""

    def rates(self) -> Rates:
        """Measured now."""

    def as_deterministic(self) -> Device:
        """The same, with steps in which a sequence's results do not depend on others. Raises UsageError."""

    def copy_rate(self) -> float:
        """Bytes per second from main memory, measured now."""

    def streamed(self, sizes: Sizes, layers: Sequence[int]) -> StreamedSizes:
        """The sizes of a graph whose layers with these indices are streamed. sizes: of the graph without."""


class _SharesThreads(Protocol):
    """An executor of the CPU."""

    def share_threads(self, other: Any) -> None:
        """Computes on the threads of another one, whose steps never run beside those of this one."""


@dataclass(frozen=True, slots=True)
class PartSizes:
    """A part of the model, and its sizes where it is."""

    on_device: bool
    graph: Graph  # not yet optimized
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class SplitSizes(Sizes):
    """The sizes of all parts together."""

    parts: tuple[PartSizes, ...]
    placement: Placement
    reason: str = ""  # for the choice between layers on the CPU and streamed ones

    @property
    def num_cpu_parts(self) -> int:
        """More than one if the CPU has the experts of layers of the device."""
        return sum(not part.on_device for part in self.parts)

    def on(self, *, device: bool) -> Sizes:
        """The sizes of the parts on the device, or of those on the CPU: of streamed layers, their weights there."""
        if not device and isinstance(streamed := self.parts[0].sizes, StreamedSizes):
            weights = {p: streamed.weights[p] for p in streamed.hosted}
            matrices = {p: streamed.matrices[p] for p in streamed.hosted if p in streamed.matrices}
            return replace(_together(self.graph, []), weights=weights, matrices=matrices)
        here = [part.sizes for part in self.parts if part.on_device == device]
        return here[0] if len(here) == 1 else _together(self.graph, here)


def _together(graph: Graph, parts: Sequence[Sizes]) -> Sizes:
    """graph: the whole model; its cache layout is that of all parts."""
    weights: dict[Parameter, int] = {}
    matrices: dict[Parameter, PackedType] = {}
    for part in parts:
        for parameter, num_bytes in part.weights.items():
            weights[parameter] = weights.get(parameter, 0) + num_bytes
        matrices.update(part.matrices)
    cache = CacheSizes(
        graph.cache_layout,
        sum(part.cache.token_bytes for part in parts),
        sum(part.cache.block_token_bytes for part in parts),
        sum(part.cache.state_bytes for part in parts),
        tuple(name for part in parts for name in part.cache.formats),
    )
    formats = {layer: found for part in parts for layer, found in part.kv_formats.items()}
    return Sizes(graph, weights, matrices, sum(part.workspace_bytes for part in parts), cache, formats)


@dataclass(frozen=True, slots=True)
class SplitBackend:
    """Implements `octavo.backends.Backend` on a device, and on the CPU where the device's memory ends.

    config: `gpu_layers` and `gpu_memory`, and the size of the cache that layers bring with them. room: bytes of the
    device for the model, whatever is free there now; None: as `gpu_memory` says.
    """

    device: Device
    cpu: Backend
    config: EngineConfig
    room: int | None = None

    PAGES_WEIGHTS = True  # those on the CPU

    def device_limit(self) -> MemoryBudget:
        """The device's memory that a model which is not loaded yet may use."""
        if self.room is not None:
            return MemoryBudget(MemoryBudget.with_usable(self.room))
        free, wanted = self.device.memory(), self._wanted_bytes
        if wanted is not None:
            return MemoryBudget(MemoryBudget.with_usable(wanted))
        return MemoryBudget(free.available_bytes // 2) if self.device.uses_main_memory else free

    def left_on_device(self, weight_bytes: int, workspace_bytes: int) -> int:
        """The bytes for a cache beside loaded weights of so many bytes and a workspace, which is not taken yet."""
        wanted = self._wanted_bytes
        if wanted is None:
            return self.device_limit().usable_bytes - workspace_bytes
        return min(wanted - weight_bytes, self.device.memory().available_bytes) - workspace_bytes

    @property
    def _wanted_bytes(self) -> int | None:
        """`gpu_memory` in bytes."""
        part = self.config.gpu_memory_part
        return part if part is None or isinstance(part, int) else int(part * self.device.total_memory())

    def check_memory(self) -> None:
        """Raises UsageError if `gpu_memory` is more than there is."""
        free, wanted = self.device.memory().available_bytes, self._wanted_bytes
        if wanted is not None and wanted > free:
            given = f", {wanted / 2**30:.2f} GiB," if isinstance(self.config.gpu_memory_part, float) else ""
            raise UsageError(
                f"gpu_memory is {self.config.gpu_memory}{given} and {free / 2**30:.2f} GiB of the GPU's memory are "
                "free; give less, or end other programs that use it"
            )

    def sizes(
        self,
        graph: Graph,
        weights: Mapping[str, Weight],
        limits: ExecutorLimits,
        *,
        num_threads: int = 0,
        kv_dtype: KVDtype = "float16",
    ) -> Sizes:
        """See `octavo.backends.Backend`. Of a model that is split, `SplitSizes`."""
        if self.room is None:
            self.check_memory()
        room = self.device_limit().usable_bytes

        @cache
        def sizes_of(placement: Placement) -> SplitSizes:
            if placement.streamed_layers:
                return self._streamed(graph, sizes_of(replace(placement, streamed_layers=0)), placement)
            found = []
            for part in parts_of(graph, placement):
                backend = self.device if part.on_device else self.cpu
                sizes = backend.sizes(part.graph, weights, limits, num_threads=num_threads, kv_dtype=kv_dtype)
                found.append(PartSizes(part.on_device, part.graph, sizes))
            return _all_parts(graph, found, placement)

        def needed(placement: Placement) -> int:
            return self._device_bytes(sizes_of(placement), limits)

        if self.config.num_gpu_layers is not None:
            placement = self._asked(graph, self.config.num_gpu_layers, needed, room)
        else:
            placement = best_placement(graph, lambda p: needed(p) <= room)
        if not placement.is_whole and self.config.num_gpu_layers is None:
            other = least_streamed(graph, lambda p: needed(p) <= room)
            if needed(other) <= room:
                return self._cheaper(sizes_of(placement), sizes_of(other), limits)
            if self.config.gpu_offload == "stream":
                raise InsufficientMemoryError(
                    f"gpu_offload stream: the places of streamed layers need {needed(other) / 2**30:.2f} GiB of the "
                    f"GPU's memory with the cache, and {room / 2**30:.2f} GiB can be used; lower max_model_len, or "
                    "leave it out"
                )
        if placement.is_whole:
            return self.device.sizes(graph, weights, limits, num_threads=num_threads, kv_dtype=kv_dtype)
        return sizes_of(placement)

    def _cheaper(self, beside: SplitSizes, streamed: SplitSizes, limits: ExecutorLimits) -> SplitSizes:
        """Layers on the CPU, or streamed ones if that is asked for or takes less time, with the reason."""
        choice = self.config.gpu_offload
        # A device of tests has no link to copy over. Layers that are read from disk in each step must be asked for.
        fits = streamed.on(device=False).weight_bytes <= self.cpu_memory().usable_bytes
        if choice == "stream":
            return replace(streamed, reason="as gpu_offload says")
        if choice == "cpu" or not fits or (choice == "auto" and self.device.uses_main_memory):
            return beside
        rates, tokens = self.offload_rates(), limits.max_num_batched_tokens
        generates, users = beside.graph.generates, self.config.gpu_offload_users or limits.max_num_seqs
        seconds = [
            rates.workload_seconds([(p.on_device, p.sizes) for p in sizes.parts], tokens, users, generates=generates)
            for sizes in (beside, streamed)
        ]
        workload = workload_name(tokens, users, generates=generates)
        if seconds[1] < seconds[0]:
            reason = f"{workload} at least {seconds[1]:.3g} s, and {seconds[0]:.3g} s with {beside.placement}"
            return replace(streamed, reason=reason)
        reason = f"{workload} at least {seconds[0]:.3g} s, and {seconds[1]:.3g} s if layers are streamed"
        return replace(beside, reason=reason)

    def offload_rates(self) -> OffloadRates:
        """Measured once a process."""
        return _measured(cast(Hashable, self.device), cast(Hashable, self.cpu))

    def _streamed(self, graph: Graph, whole: SplitSizes, placement: Placement) -> SplitSizes:
        """whole: the sizes with all layers on the device."""
        [part] = whole.parts
        indices = sorted({node.layer_index for node in graph.nodes if node.layer_index is not None})
        layers = [indices[i] for i in spread(placement.streamed_layers, len(indices))]
        return _all_parts(graph, [replace(part, sizes=self.device.streamed(part.sizes, layers))], placement)

    def _asked(self, graph: Graph, wanted: int, needed: Callable[[Placement], int], room: int) -> Placement:
        """The placement with so many layers always on the device. Raises UsageError or InsufficientMemoryError."""
        possible, streams = possible_layers(graph), self.config.gpu_offload == "stream"
        count = possible[-1]
        if wanted > count:
            raise UsageError(
                f"gpu_layers is {wanted}, and the model has {count} layers; give at most that many, or auto"
            )
        if wanted not in possible and not streams:
            below, above = (max(n for n in possible if n < wanted), min(n for n in possible if n > wanted))
            raise UsageError(
                f"gpu_layers is {wanted}, but layers of this model share a cache there; give {below} or {above}"
            )
        placement = Placement(count, count, streamed_layers=count - wanted) if streams else Placement(count, wanted)
        if (wanted or streams) and (num_bytes := needed(placement)) > room:
            most = best_placement(graph, lambda p: needed(p) <= room)
            raise InsufficientMemoryError(
                f"gpu_layers {wanted} need {num_bytes / 2**30:.2f} GiB of the GPU's memory with their part of the "
                f"cache, and {room / 2**30:.2f} GiB can be used; give auto ({most})"
            )
        return placement

    def _device_bytes(self, sizes: SplitSizes, limits: ExecutorLimits) -> int:
        """The bytes of the parts on the device, with a cache for a request of the wanted length."""
        config, part = self.config, sizes.on(device=True)
        if config.kv_cache_bytes is not None:
            cache = config.kv_cache_bytes * part.cache.block_token_bytes // max(sizes.cache.block_token_bytes, 1)
        else:
            tokens = config.max_model_len or min(limits.max_model_len, _ASSUMED_CONTEXT)
            cache = part.cache.sequence_bytes(tokens, config.block_size, limits.max_num_batched_tokens)
        return part.weight_bytes + part.workspace_bytes + cache

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
        """See `octavo.backends.Backend.compile`."""
        if not isinstance(graph, Sizes):
            graph = self.sizes(graph, weights, limits, num_threads=num_threads, kv_dtype=kv_dtype)
        options = {"num_threads": num_threads, "kv_dtype": kv_dtype, "pack_cache": pack_cache}
        if isinstance(graph, SplitSizes) and graph.placement.streamed_layers:
            graph = graph.parts[0].sizes
        if not isinstance(graph, SplitSizes):
            return self.device.compile(graph, weights, limits, progress=progress, **options)  # type: ignore[arg-type]
        if pack_cache is not None and pack_cache.resident_bytes is not None and graph.num_cpu_parts > 1:
            raise InsufficientMemoryError(EXPERTS_FROM_DISK)
        stored = [sum(parameter_info(weights, p).nbytes for p in part.graph.parameters) for part in graph.parts]
        executors: list[Executor] = []
        with_threads: _SharesThreads | None = None  # the first part on the CPU: the others compute on its threads
        try:
            for number, part in enumerate(graph.parts):
                backend = self.device if part.on_device else self.cpu
                report = _of_part(progress, sum(stored[:number]), sum(stored))
                executors.append(backend.compile(part.sizes, weights, limits, progress=report, **options))  # type: ignore[arg-type]
                if not part.on_device:
                    compiled = cast(_SharesThreads, executors[-1])
                    if with_threads is None:
                        with_threads = compiled
                    else:
                        compiled.share_threads(with_threads)
        except BaseException:
            for executor in executors:
                executor.close()
            raise
        return SplitExecutor(graph, executors)

    def expected_paging(
        self, sizes: Sizes, weights: Mapping[str, Weight], pack_cache: PackCacheOptions, sample: Path
    ) -> Paging:
        """See `octavo.backends.Backend`. sizes: of the part on the CPU, or of a model with streamed layers."""
        if isinstance(sizes, SplitSizes):
            num_bytes, placement = sizes.on(device=False).weight_bytes, sizes.placement
            resident = placement.num_layers - placement.streamed_layers
            return Paging(sample.parent, 0, 0, resident, num_bytes, read_rate(sample))
        return self.cpu.expected_paging(sizes, weights, pack_cache, sample)

    def join_group(
        self, name: str, rank: int, size: int, buffer_bytes: int, given_up: Callable[[], str] | None = None
    ) -> RankGroup:
        """See `octavo.backends.Backend`."""
        return self.device.join_group(name, rank, size, buffer_bytes, given_up)

    def memory(self) -> MemoryBudget:
        """The memory of the device."""
        return self.device.memory()

    def cpu_memory(self) -> MemoryBudget:
        """The memory for the parts on the CPU."""
        free = self.cpu.memory()
        if not self.device.uses_main_memory:
            return free
        return free.without(min(self.device_limit().usable_bytes, free.available_bytes))

    def describe(self) -> BackendDescription:
        """See `octavo.backends.Backend`."""
        return self.device.describe()

    def cache_memory(self, executor: Executor, cpu: MemoryBudget) -> MemoryBudget:
        """The memory for a cache beside a loaded model, so that each part fits where it is. cpu: free there."""
        if not isinstance(executor, SplitExecutor):
            left = self.left_on_device(executor.weight_bytes, executor.workspace_bytes)
            return MemoryBudget(MemoryBudget.with_usable(max(left, 0)))
        part = executor.sizes.on(device=True)
        left = self.left_on_device(part.weight_bytes, part.workspace_bytes)
        return MemoryBudget(MemoryBudget.with_usable(cache_room(executor.sizes, left, cpu.usable_bytes)))


def _all_parts(graph: Graph, parts: Sequence[PartSizes], placement: Placement) -> SplitSizes:
    whole = _together(graph, [part.sizes for part in parts])
    return SplitSizes(
        whole.graph,
        whole.weights,
        whole.matrices,
        whole.workspace_bytes,
        whole.cache,
        whole.kv_formats,
        tuple(parts),
        placement,
    )


@cache
def _measured(device: Hashable, cpu: Hashable) -> OffloadRates:
    gpu = cast(Device, device)
    return OffloadRates(gpu.rates(), cast(Device, cpu).rates(), gpu.copy_rate())


def cache_room(sizes: SplitSizes, device_bytes: int, cpu_bytes: int) -> int:
    """Bytes of all parts of the cache together, so that each finds room in the bytes of its place."""
    room = device_bytes + cpu_bytes
    for is_device, here in ((True, device_bytes), (False, cpu_bytes)):
        part, whole = sizes.on(device=is_device).cache, sizes.cache
        for own, total in ((part.block_token_bytes, whole.block_token_bytes), (part.state_bytes, whole.state_bytes)):
            if own:
                room = min(room, here * total // own)
    return max(room, 0)


def _of_part(progress: LoadProgress | None, before: int, total: int) -> LoadProgress | None:
    if progress is None:
        return None
    return lambda phase, done, _: progress(phase, min(before + done, total), total)


class SplitExecutor:
    """Implements `octavo.backends.Executor` over those of the parts. A step passes through them one after another.

    Values between parts lie in main memory, pinned where a GPU is on one side; caches lie with their layers.
    """

    max_in_flight = 1
    num_stages = 1

    def __init__(self, sizes: SplitSizes, executors: Sequence[Executor]) -> None:
        """executors: one a part."""
        self.sizes = sizes
        self.executors = tuple(executors)
        self._thread = ThreadPoolExecutor(1, "octavo-split")
        self._num_parts_done = 0
        self._moved = MovedSizes()
        self._ranges: list[tuple[int, int]] = []  # of the bytes of a block, those of each part
        self._state_ranges = _ranges(part.sizes.cache.moved_state_bytes for part in sizes.parts)
        self.cache_sizes = sizes.cache
        self.workspace_bytes = sum(each.workspace_bytes for each in executors)
        self.weight_bytes = sum(each.weight_bytes for each in executors)
        self.mapped_bytes = sum(each.mapped_bytes for each in executors)
        self.num_threads = max(each.num_threads for each in executors)
        self.paging: Paging | None = next((each.paging for each in executors if each.paging is not None), None)

    def allocate_cache(self, num_blocks: int, block_size: int, num_states: int = 0) -> None:
        self._moved = MovedSizes.of(self.cache_sizes, num_blocks, block_size, num_states)
        self._ranges = _ranges(part.sizes.cache.moved_bytes(block_size) for part in self.sizes.parts)
        for executor in self.executors:
            executor.allocate_cache(num_blocks, block_size, num_states)

    def prepare_adapter(self, parts: Mapping[str, LowRank]) -> list[object]:
        """See `AdaptingExecutor`."""
        return [cast(AdaptingExecutor, each).prepare_adapter(parts) for each in self.executors]

    def load_adapter(self, slot: int, prepared: list[object]) -> None:
        """See `AdaptingExecutor`."""
        for executor, own in zip(self.executors, prepared, strict=True):
            cast(AdaptingExecutor, executor).load_adapter(slot, own)

    def drop_adapter(self, slot: int) -> None:
        """See `AdaptingExecutor`."""
        for executor in self.executors:
            cast(AdaptingExecutor, executor).drop_adapter(slot)

    def submit(self, batch: Batch) -> PendingStep:
        self._moved.check(batch)
        values = dict(zip(self.sizes.parts[0].graph.inputs, batch.inputs, strict=False))  # the part checks their number
        first = self.executors[0].submit(self._batch(0, batch, values))  # which checks the numbers
        return _SplitStep(self._thread.submit(self._run, first, batch, values))

    def _run(self, step: PendingStep, batch: Batch, values: dict[Value, Float32]) -> StepOutput:
        last = len(self.executors) - 1
        for number in range(last):
            outputs = step.wait().values
            self._num_parts_done += 1
            values.update(zip(self.sizes.parts[number].graph.outputs, outputs, strict=True))
            step = self.executors[number + 1].submit(self._batch(number + 1, batch, values))
        return step.wait()

    def _batch(self, number: int, batch: Batch, values: Mapping[Value, Float32]) -> Batch:
        inputs = tuple(values[value] for value in self.sizes.parts[number].graph.inputs)
        batch = with_part(batch, self._ranges[number], self._state_ranges[number])
        if number == len(self.executors) - 1:
            return replace(batch, inputs=inputs)
        return replace(batch, inputs=inputs, sampling=None, return_logits=False)

    def sleep(self) -> None:
        """See `octavo.backends.SleepingExecutor`. The parts on the CPU keep their memory."""
        for executor in self.executors:
            if isinstance(executor, SleepingExecutor):
                executor.sleep()

    def wake_up(self) -> None:
        """See `octavo.backends.SleepingExecutor`."""
        for executor in self.executors:
            if isinstance(executor, SleepingExecutor):
                executor.wake_up()

    def progress(self) -> int:
        """See `octavo.backends.work_done.WatchedExecutor`. Parts on the device count as they end."""
        return self._num_parts_done + sum(
            executor.progress() for executor in self.executors if isinstance(executor, WatchedExecutor)
        )

    def close(self) -> None:
        self._thread.shutdown()
        for executor in self.executors:
            executor.close()


def _ranges(sizes: Iterable[int]) -> list[tuple[int, int]]:
    """Where parts of these sizes begin and end, one behind the other."""
    ends = [*accumulate(sizes)]
    return list(zip([0, *ends], ends, strict=False))


class _SplitStep:
    """Implements `octavo.backends.PendingStep`."""

    def __init__(self, result: Future[StepOutput]) -> None:
        self._result = result

    def wait(self) -> StepOutput:
        return self._result.result()
