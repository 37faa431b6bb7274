"""Main memory and GPU memory of models, and the shares of several models."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.backends.memory import Sizes
from octavo.backends.split import SplitBackend
from octavo.backends.split_sizes import SplitSizes, cache_room
from octavo.config import EngineConfig
from octavo.engine.loading.devices import backend_of, free_memory, step_tokens
from octavo.engine.loading.larger_than_memory import MIN_MODEL_LEN, runs_from_disk
from octavo.engine.loading.model_graph import model_sizes
from octavo.loader.checkpoint import Checkpoint, open_checkpoint

PROCESS_BYTES = 128 << 20  # an engine's process without its model
_CONTEXT_BYTES = 512 << 20  # a process on a GPU without its model: the driver's context and the kernels


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Bytes in main memory and on the GPU: the use of one model or of several, or a limit."""

    main: int
    device: int = 0

    def __add__(self, other: ModelMemory) -> ModelMemory:
        return ModelMemory(self.main + other.main, self.device + other.device)

    def fits(self, limit: ModelMemory) -> bool:
        """True if neither memory is above the limit."""
        return self.main <= limit.main and self.device <= limit.device

    def __str__(self) -> str:
        text = f"{self.main / 2**30:.2f} GiB"
        return f"{text} of main memory and {self.device / 2**30:.2f} GiB of the GPU's" if self.device else text


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The memory of a model, and the options that keep its engine within it."""

    memory: ModelMemory
    config: EngineConfig


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """The shares of a server's memory for its models.

    limit: memory for all loaded models together.
    machine: the memory they could use without a limit. None if the limit is less than all of main memory; in that case
    no model may run from disk.
    """

    limit: ModelMemory
    machine: ModelMemory | None
    num_models: int

    @classmethod
    def of(cls, machine: ModelMemory, given: int | None, num_models: int) -> MemoryShares:
        """Return the shares of num_models models.

        given: `models_memory`, a limit on the GPU's memory if there is a GPU, otherwise on main memory.
        """
        if given is None:
            return cls(machine, machine, num_models)
        if machine.device:
            return cls(ModelMemory(machine.main, given), machine, num_models)
        return cls(ModelMemory(given), machine if given >= machine.main else None, num_models)

    def plan(self, path: Path, config: EngineConfig, held: ModelMemory) -> ModelPlan:
        """Plan a model while other models hold `held`.

        Each model gets an equal share of the memory, so that none has to be unloaded if all fit. The cache gets what
        the weights leave of the share: at least one request of full length, even if other models must then be unloaded,
        and at most as many requests as can run at once. The same holds for a model that fits on the GPU only by itself.
        A model that does not fit on the GPU is split: its layers take what the other models leave of the GPU, or the
        share if that is more. A model larger than main memory runs from disk and leaves no room for other models there.
        """
        with closing(open_checkpoint(path)) as checkpoint:
            context: int = config.max_model_len or checkpoint.config.max_position_embeddings
            if isinstance(backend_of(config), SplitBackend):
                return self._on_device(checkpoint, config, held, context)
            sizes = model_sizes(checkpoint, config, context)
        count, machine = config.data_parallel_size, self.machine
        main = self.limit.main // count
        if machine is not None and runs_from_disk(config, path, sizes, machine.main - PROCESS_BYTES, context):
            return ModelPlan(ModelMemory(main * count), config)
        fixed = sizes.weight_bytes + sizes.workspace_bytes + PROCESS_BYTES
        cache = self._cache_bytes(config, sizes, context, main, fixed)
        return ModelPlan(ModelMemory((fixed + cache) * count), replace(config, kv_cache_memory=cache))

    def _cache_bytes(self, config: EngineConfig, sizes: Sizes, context: int, memory: int, fixed: int) -> int:
        """Return the bytes for the cache of a model that otherwise needs `fixed` bytes. `plan` gives the limits.

        memory: bytes that all models together may take.
        """
        if config.kv_cache_bytes is not None:
            return config.kv_cache_bytes
        block_size, step = config.block_size, step_tokens(config)
        request_bytes = sizes.cache.sequence_bytes(context, block_size, step)
        wanted_bytes = max(memory // self.num_models - fixed, request_bytes)
        # At least a short request, so that the sum is right for a model that does not fit even alone.
        least_bytes = sizes.cache.sequence_bytes(min(context, MIN_MODEL_LEN), block_size, step)
        return max(least_bytes, min(wanted_bytes, request_bytes * config.max_num_seqs, memory - fixed))

    def _on_device(self, checkpoint: Checkpoint, config: EngineConfig, held: ModelMemory, context: int) -> ModelPlan:
        whole, limit = self._sized(checkpoint, config, self.limit.device, context)
        if not isinstance(whole, SplitSizes):
            fixed = whole.weight_bytes + whole.workspace_bytes
            cache = self._cache_bytes(config, whole, context, limit, fixed)
            # The sizes after loading may differ slightly from the plan.
            device = min(fixed + cache + fixed // 50 + (1 << 20), limit)
            config = replace(config, kv_cache_memory=cache, gpu_memory=device)
            return ModelPlan(ModelMemory(PROCESS_BYTES, device + self._context_bytes(config)), config)
        room = max(self.limit.device - held.device, self.limit.device // self.num_models)
        if config.num_gpu_layers is not None:
            room = self.limit.device
        sizes, room = self._sized(checkpoint, config, room, context)
        split = sizes if isinstance(sizes, SplitSizes) else whole
        on_cpu, on_device = split.on(device=False), split.on(device=True)
        fixed_main = on_cpu.weight_bytes + on_cpu.workspace_bytes + PROCESS_BYTES
        fixed_device = on_device.weight_bytes + on_device.workspace_bytes
        taken = room + self._context_bytes(config) if on_device.weights else 0
        config = replace(config, gpu_memory=room)
        # Its layers on the CPU run from disk, using all of main memory, as its engine decides.
        if self.machine is not None and fixed_main > self.machine.main:
            return ModelPlan(ModelMemory(self.limit.main, taken), config)
        block_size, step = config.block_size, step_tokens(config)
        request_bytes = split.cache.sequence_bytes(context, block_size, step)
        fitting = cache_room(split, room - fixed_device, max(self.limit.main - fixed_main, 0))
        least = split.cache.sequence_bytes(min(context, MIN_MODEL_LEN), block_size, step)
        cache = config.kv_cache_bytes or max(min(request_bytes, fitting), least)
        main = fixed_main + cache * on_cpu.cache.block_token_bytes // max(split.cache.block_token_bytes, 1)
        return ModelPlan(ModelMemory(main, taken), replace(config, kv_cache_memory=cache))

    def _sized(self, checkpoint: Checkpoint, config: EngineConfig, room: int, context: int) -> tuple[Sizes, int]:
        """Return the sizes of a model within `room` bytes of GPU memory, and the bytes that it may use there."""
        backend = backend_of(config)
        assert isinstance(backend, SplitBackend)
        room = max(room - self._context_bytes(config), 1)
        if config.gpu_memory is not None:
            room = min(room, backend.device_limit().usable_bytes)
        return model_sizes(checkpoint, config, context, backend=replace(backend, room=room)), room

    def _context_bytes(self, config: EngineConfig) -> int:
        backend = backend_of(config)
        assert isinstance(backend, SplitBackend)
        return 0 if backend.device.uses_main_memory else _CONTEXT_BYTES


def machine_memory(config: EngineConfig) -> ModelMemory:
    """Return the memory that models may use now.

    Querying a GPU takes some of its memory for the lifetime of this process.
    """
    backend = backend_of(config)
    if not isinstance(backend, SplitBackend):
        return ModelMemory(free_memory(config).usable_bytes)
    device = SplitBackend(backend.device, backend.cpu, replace(config, gpu_memory=None)).device_limit()
    return ModelMemory(backend.cpu_memory().usable_bytes, device.usable_bytes)
