"""Models larger than memory: how much of their weights can stay in memory, and the speed to expect."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from octavo import env
from octavo.backends import Paging
from octavo.backends.memory import MemoryBudget, Sizes, address_space_note
from octavo.backends.split import EXPERTS_FROM_DISK
from octavo.backends.split_sizes import SplitSizes
from octavo.config import EngineConfig
from octavo.engine.loading.devices import backend_of, step_tokens
from octavo.engine.loading.progress_bar import size
from octavo.errors import InsufficientMemoryError
from octavo.graph.cache import CacheSizes

# A smaller context is useless; an error with the missing memory is better.
MIN_MODEL_LEN = 256


def resident_bytes(config: EngineConfig, path: Path, sizes: Sizes, memory: MemoryBudget, model_len: int) -> int | None:
    """Return how many bytes of weights to keep in memory if the model is larger than it, or None to keep all of them.

    path: the model's path, for errors.
    memory: free memory before the model is loaded.
    model_len: tokens of the longest request.
    Raises InsufficientMemoryError if the model is larger and cannot run from mapped weights.
    """
    least = least_cache(config, sizes.cache, model_len)
    left = memory.usable_bytes - sizes.workspace_bytes - least
    if sizes.weight_bytes <= left:
        return None
    can_page = backend_of(config).PAGES_WEIGHTS and config.pack_cache is not False
    if can_page and left > 0:
        # A longer context is worth some of the memory, since the weights outside it are read again anyway.
        more = sizes.cache.sequence_bytes(model_len, config.block_size, step_tokens(config)) - least
        return left - (0 if config.kv_cache_bytes is not None else min(max(more, 0), left // 4))
    if sizes.weight_bytes <= memory.available_bytes:
        return None  # planning the KV cache reports what is missing
    hint = " or leave out --no-pack-cache to run it from disk," if config.pack_cache is False else ""
    raise InsufficientMemoryError(
        f"{path}: the weights take {size(sizes.weight_bytes)}, but only {size(memory.available_bytes)} of memory is "
        f"free. Free some,{hint} or use a smaller model or quantization{address_space_note()}"
    )


def part_in_main_memory(config: EngineConfig, sizes: Sizes) -> tuple[EngineConfig, Sizes]:
    """Return the options and sizes of the part of a model that may run from disk.

    For a split model, this is the part on the CPU with its share of `kv_cache_memory`; otherwise it is the whole model.
    """
    if not isinstance(sizes, SplitSizes):
        return config, sizes
    here = sizes.on(device=False)
    if config.kv_cache_bytes is not None:
        share = here.cache.block_token_bytes / max(sizes.cache.block_token_bytes, 1)
        config = replace(config, kv_cache_memory=max(int(config.kv_cache_bytes * share), 1))
    return config, here


def runs_from_disk(config: EngineConfig, path: Path, sizes: Sizes, usable_bytes: int, model_len: int) -> bool:
    """True if the model is larger than the memory it may use. Parameters and errors are as in `resident_bytes`."""
    memory = MemoryBudget(MemoryBudget.with_usable(usable_bytes))
    return resident_bytes(config, path, sizes, memory, model_len) is not None


def disk_problem(config: EngineConfig, sizes: Sizes) -> str | None:
    """Return the reason why packed weights cannot be kept on disk and run from there, or None if they can."""
    if isinstance(sizes, SplitSizes) and sizes.num_cpu_parts > 1:
        return EXPERTS_FROM_DISK
    config, sizes = part_in_main_memory(config, sizes)
    packed_bytes, folder = sum(matrix.packed_bytes for matrix in sizes.matrices.values()), env.pack_cache_dir()
    if packed_bytes > config.pack_cache_bytes:
        return (
            f"its packed weights take {size(packed_bytes)}, more than --pack-cache-size allows "
            f"({size(config.pack_cache_bytes)})"
        )
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if (free := shutil.disk_usage(existing).free) < packed_bytes:
        return f"its packed weights take {size(packed_bytes)}, but the disk of {folder} has only {size(free)} free"
    return None


def least_cache(config: EngineConfig, cache: CacheSizes, model_len: int) -> int:
    """Return the bytes of the smallest KV cache with which the model can start."""
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes
    tokens = model_len if config.max_model_len is not None else min(model_len, MIN_MODEL_LEN)
    return cache.sequence_bytes(tokens, config.block_size, step_tokens(config))


def memory_for_cache(
    config: EngineConfig, paging: Paging, cache: CacheSizes, memory: MemoryBudget, model_len: int
) -> int:
    """Return the available bytes for a model that runs from disk; its KV cache gets a share of them.

    memory: free memory with the workspace allocated. The headroom covers everything else that has been loaded since,
    such as the vocabulary.
    """
    least = MemoryBudget.with_usable(least_cache(config, cache, model_len))
    return max(memory.available_bytes - paging.memory_bytes, least)


def paging_note(paging: Paging, weight_bytes: int, num_layers: int) -> str:
    """Return a sentence about a model that runs from disk: weights in memory, bytes read per token, and the speed."""
    return (
        f"the weights take {size(weight_bytes)}, too much to stay in memory with the KV cache: they are read from "
        f"{paging.path}. {paging.resident_layers} of {num_layers} layers ({size(paging.resident_bytes)}) stay in "
        f"memory, and each token reads {size(paging.bytes_per_token)} from the disk at {size(paging.bytes_per_s)}/s: "
        f"expect at most {paging.tokens_per_s:.2g} tokens/s, and as much again for each further sequence"
    )
