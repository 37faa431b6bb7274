"""A model in parts on a device and on the CPU: where each part goes, and how all of them are loaded."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, cast

from octavo.backends import Backend, BackendDescription, Executor, ExecutorLimits, Paging
from octavo.backends.memory import MemoryBudget, Sizes, StreamedSizes
from octavo.backends.offload import OffloadRates, workload_name
from octavo.backends.parameters import parameter_info
from octavo.backends.placement import Placement, best_placement, least_streamed, parts_of, possible_layers, spread
from octavo.backends.rates import Rates, read_rate
from octavo.backends.split_executor import SplitExecutor
from octavo.backends.split_sizes import PartSizes, SplitSizes, cache_room, sizes_of_parts
from octavo.errors import InsufficientMemoryError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from octavo.backends import PackCacheOptions, RankGroup
    from octavo.config import EngineConfig, KVDtype, LoadProgress
    from octavo.graph.builder import Graph
    from octavo.quantization.packed import Weight

EXPERTS_FROM_DISK = (
    "the experts that do not fit on the GPU are larger than main memory, and can run from disk only with their whole "
    "layers: set gpu_layers to 0 or more"
)
_ASSUMED_CONTEXT = 8192  # tokens of cache that the layers of a device leave room for, if nobody says how many


class Device(Backend, Protocol):
    """A backend whose memory may be smaller than the model."""

    @property
    def uses_main_memory(self) -> bool:
        """True for a test device, whose tensors are in the CPU's memory."""

    def total_memory(self) -> int:
        """Return the size of the device's memory in bytes."""

    def rates(self) -> Rates:
        """Measure the rates of the device's memory and arithmetic."""

    def as_deterministic(self) -> Device:
        """Return this device with steps in which a sequence's results do not depend on other sequences.

        Raises UsageError if the device does not support this.
        """

    def copy_rate(self) -> float:
        """Measure the rate of copies from main memory, in bytes per second."""

    def streamed(self, sizes: Sizes, layers: Sequence[int]) -> StreamedSizes:
        """Return the sizes of a graph with these layers streamed.

        sizes: sizes of the graph without streaming.
        """


class _SharesThreads(Protocol):
    """An executor on the CPU that can share its threads."""

    def share_threads(self, other: Any) -> None:
        """Compute on the threads of another executor, whose steps never overlap this executor's steps."""


@dataclass(frozen=True, slots=True)
class SplitBackend:
    """Implements `octavo.backends.Backend` on a device, and on the CPU for what does not fit in the device's memory.

    config: `gpu_layers`, `gpu_memory`, and the size of the cache that layers need.
    room: device bytes for the model, regardless of what is free now; None means that `gpu_memory` decides.
    """

    device: Device
    cpu: Backend
    config: EngineConfig
    room: int | None = None

    PAGES_WEIGHTS = True  # applies to the weights on the CPU

    def device_limit(self) -> MemoryBudget:
        """Return the device memory available to a model that is not loaded yet."""
        if self.room is not None:
            return MemoryBudget(MemoryBudget.with_usable(self.room))
        free, wanted = self.device.memory(), self._wanted_bytes
        if wanted is not None:
            return MemoryBudget(MemoryBudget.with_usable(wanted))
        return MemoryBudget(free.available_bytes // 2) if self.device.uses_main_memory else free

    def left_on_device(self, weight_bytes: int, workspace_bytes: int) -> int:
        """Return the bytes left for a cache.

        weight_bytes: size of the weights, which are loaded.
        workspace_bytes: size of the workspace, which is not allocated yet.
        """
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
        """Raise UsageError if `gpu_memory` is more than the device has."""
        free, wanted = self.device.memory().available_bytes, self._wanted_bytes
        if wanted is not None and wanted > free:
            given = f" ({wanted / 2**30:.2f} GiB)" if isinstance(self.config.gpu_memory_part, float) else ""
            raise UsageError(
                f"gpu_memory is {self.config.gpu_memory}{given}, but only {free / 2**30:.2f} GiB of the GPU's memory "
                "are free; lower it, or end other programs that use the GPU"
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
        """See `octavo.backends.Backend`. Returns `SplitSizes` for a model that is split."""
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
            return sizes_of_parts(graph, found, placement)

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
                    f"gpu_offload stream: the cache and buffers of streamed layers need {needed(other) / 2**30:.2f} "
                    f"GiB of the GPU's memory, but only {room / 2**30:.2f} GiB can be used; lower max_model_len, or "
                    "leave gpu_offload out"
                )
        if placement.is_whole:
            return self.device.sizes(graph, weights, limits, num_threads=num_threads, kv_dtype=kv_dtype)
        return sizes_of(placement)

    def _cheaper(self, beside: SplitSizes, streamed: SplitSizes, limits: ExecutorLimits) -> SplitSizes:
        """Choose between layers on the CPU and streamed layers, as configured, or else by the shorter time.

        The result includes the reason for the choice.
        """
        choice = self.config.gpu_offload
        # A device of tests has no link to copy over. Layers that are read from disk in each step must be asked for.
        fits = streamed.on(device=False).weight_bytes <= self.cpu_memory().usable_bytes
        if choice == "stream":
            return replace(streamed, reason="as set by gpu_offload")
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
        """Return the rates, which are measured once per process."""
        return _measured(cast(Hashable, self.device), cast(Hashable, self.cpu))

    def _streamed(self, graph: Graph, whole: SplitSizes, placement: Placement) -> SplitSizes:
        """Return the sizes with the placement's layers streamed.

        whole: the sizes with all layers on the device.
        """
        [part] = whole.parts
        indices = sorted({node.layer_index for node in graph.nodes if node.layer_index is not None})
        layers = [indices[i] for i in spread(placement.streamed_layers, len(indices))]
        return sizes_of_parts(graph, [replace(part, sizes=self.device.streamed(part.sizes, layers))], placement)

    def _asked(self, graph: Graph, wanted: int, needed: Callable[[Placement], int], room: int) -> Placement:
        """Return the placement that keeps `wanted` layers on the device at all times.

        Raises UsageError or InsufficientMemoryError.
        """
        possible, streams = possible_layers(graph), self.config.gpu_offload == "stream"
        count = possible[-1]
        if wanted > count:
            raise UsageError(
                f"gpu_layers is {wanted}, but the model has only {count} layers; give at most {count}, or auto"
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
                f"gpu_layers {wanted}: these layers and their part of the cache need {num_bytes / 2**30:.2f} GiB of "
                f"the GPU's memory, but only {room / 2**30:.2f} GiB can be used; give auto ({most})"
            )
        return placement

    def _device_bytes(self, sizes: SplitSizes, limits: ExecutorLimits) -> int:
        """Return the bytes of the parts on the device, with a cache for one request of the wanted length."""
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
        with_threads: _SharesThreads | None = None  # the first part on the CPU, whose threads the other parts use
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
        """See `octavo.backends.Backend`.

        sizes: sizes of the part on the CPU, or of a model with streamed layers.
        """
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
        """Return the memory of the device."""
        return self.device.memory()

    def cpu_memory(self) -> MemoryBudget:
        """Return the memory for the parts on the CPU."""
        free = self.cpu.memory()
        if not self.device.uses_main_memory:
            return free
        return free.without(min(self.device_limit().usable_bytes, free.available_bytes))

    def describe(self) -> BackendDescription:
        """See `octavo.backends.Backend`."""
        return self.device.describe()

    def cache_memory(self, executor: Executor, cpu: MemoryBudget) -> MemoryBudget:
        """Return the memory for the cache of a loaded model, chosen so that each part of the cache fits where it is
        stored.

        cpu: free memory on the CPU.
        """
        if not isinstance(executor, SplitExecutor):
            left = self.left_on_device(executor.weight_bytes, executor.workspace_bytes)
            return MemoryBudget(MemoryBudget.with_usable(max(left, 0)))
        part = executor.sizes.on(device=True)
        left = self.left_on_device(part.weight_bytes, part.workspace_bytes)
        return MemoryBudget(MemoryBudget.with_usable(cache_room(executor.sizes, left, cpu.usable_bytes)))


@cache
def _measured(device: Hashable, cpu: Hashable) -> OffloadRates:
    gpu = cast(Device, device)
    return OffloadRates(gpu.rates(), cast(Device, cpu).rates(), gpu.copy_rate())


def _of_part(progress: LoadProgress | None, before: int, total: int) -> LoadProgress | None:
    if progress is None:
        return None
    return lambda phase, done, _: progress(phase, min(before + done, total), total)
