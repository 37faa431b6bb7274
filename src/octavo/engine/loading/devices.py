"""Chooses an engine's backend, by default a GPU if there is one, and a process's share of memory and cores."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from octavo.backends import Backend, default_backend, get_backend
from octavo.backends.memory import MemoryBudget
from octavo.backends.split import Device, SplitBackend
from octavo.config import EngineConfig
from octavo.errors import UsageError

STEP_TOKENS, _GPU_STEP_TOKENS = 512, 2048  # with 512, an H200 computes prompts half as fast


def backend_name(config: EngineConfig) -> str:
    """Return the name of the backend, for example `torch:cuda:1`."""
    if config.device is not None:
        return "cpu" if config.device == "cpu" else f"torch:{config.device}"
    if config.backend != "auto":
        return config.backend
    return "cpu" if config.num_ranks * config.data_parallel_size > 1 else default_backend()


def step_tokens(config: EngineConfig) -> int:
    """Return `max_num_batched_tokens`.

    Its default is large enough for the device's full speed and for one token per sequence.
    """
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    name = backend_name(config)
    is_gpu = name.startswith("torch") and not cast(Device, get_backend(name)).uses_main_memory
    return max(_GPU_STEP_TOKENS if is_gpu else STEP_TOKENS, config.max_num_seqs)


def of_rank(config: EngineConfig, rank: int) -> EngineConfig:
    """Return the options of one rank. The ranks on a machine use consecutive GPUs, starting from `device`."""
    kind, _, first = (config.device or "").partition(":")
    if kind != "cuda":
        return config
    return replace(config, device=f"cuda:{int(first or 0) + rank % len(config.ranks_here)}")


def has_own_memory(config: EngineConfig) -> bool:
    """True if each rank on a machine has memory of its own, on its GPU."""
    return backend_name(config).startswith("torch:cuda")


def own_memory(config: EngineConfig, held_bytes: int = 0) -> MemoryBudget:
    """Return the GPU memory that a rank may still take: what is free, or what is left of `gpu_memory`.

    held_bytes: bytes of its loaded weights.
    Raises UsageError if `gpu_memory` is more than the GPU has.
    """
    device = cast(Device, get_backend(backend_name(config)))
    if config.gpu_memory is None:
        return device.memory()
    place = SplitBackend(device, get_backend("cpu"), config)
    if not held_bytes:
        place.check_memory()
    return MemoryBudget(MemoryBudget.with_usable(max(place.left_on_device(held_bytes, 0), 0)))


def backend_of(config: EngineConfig) -> Backend:
    """Return the backend that runs a model with these options. Raises UsageError if there is none."""
    name = backend_name(config)
    if name.partition(":")[0] == "torch":
        device = cast(Device, get_backend(name))
        if config.deterministic:
            device = device.as_deterministic()
        return device if config.num_ranks > 1 else SplitBackend(device, get_backend("cpu"), config)
    if config.num_gpu_layers or config.gpu_memory is not None:
        option = f"gpu_layers {config.gpu_layers}" if config.num_gpu_layers else f"gpu_memory {config.gpu_memory}"
        raise UsageError(f"{option}: torch finds no usable GPU; leave it out, or see `octavo doctor` and docs/gpu.md")
    if config.deterministic and name == "reference":
        raise UsageError(
            "deterministic works on a GPU and with the backend cpu, not with reference; leave one of the two out"
        )
    return get_backend(name)


def free_memory(config: EngineConfig) -> MemoryBudget:
    """Return the free memory of the backend's device."""
    return backend_of(config).memory()


def memory_of_rank(config: EngineConfig, replica_bytes: int = 0, held_bytes: int = 0) -> MemoryBudget:
    """Return one rank's share of this machine's free memory.

    replica_bytes: bytes that each further replica will take before its cache.
    held_bytes: bytes of the rank's weights, once loaded.
    """
    if has_own_memory(config):
        return own_memory(config, held_bytes)
    available = free_memory(config).available_bytes - (config.data_parallel_size - 1) * replica_bytes
    return MemoryBudget(available // (len(config.ranks_here) * config.data_parallel_size))


def threads_of_rank(config: EngineConfig) -> int:
    """Return the number of compute threads of each rank on this machine: as configured, or a fair share of its cores.

    0 lets the backend decide.
    """
    if config.num_threads or config.num_ranks * config.data_parallel_size == 1:
        return config.num_threads
    num_processes = len(config.ranks_here) * config.data_parallel_size
    return max(backend_of(config).describe().num_threads // num_processes, 1)
