"""Compiles a model, or a rank's part of it, in one process. The weights are held in memory or read from disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

from octavo.backends import PACKING, Executor, ExecutorLimits, KeepJob, PackCacheOptions, Paging, RankGroup
from octavo.backends.kept_files import tenth_of_disk
from octavo.backends.memory import Sizes
from octavo.backends.split import SplitBackend
from octavo.backends.split_sizes import SplitSizes
from octavo.config import EngineConfig, LoadProgress
from octavo.engine.loading.devices import backend_of, memory_of_rank, threads_of_rank
from octavo.engine.loading.larger_than_memory import paging_note, part_in_main_memory, resident_bytes
from octavo.engine.loading.model_graph import held, model_sizes
from octavo.engine.loading.progress_bar import size
from octavo.engine.loading.weight_notes import size_notes
from octavo.errors import InsufficientMemoryError
from octavo.graph.builder import Graph
from octavo.loader.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

_RACY_S = 2.1  # age from which a file's time stamps identify its content


@runtime_checkable
class _MatrixSharer(Protocol):
    paging: Paging | None
    compile_beside: Callable[..., Executor] | None


def compile_graph(
    config: EngineConfig,
    checkpoint: Checkpoint,
    graph: Graph,
    limits: ExecutorLimits,
    progress: LoadProgress | None,
    group: RankGroup | None = None,
    beside: Executor | None = None,
    later: list[KeepJob] | None = None,
) -> Executor:
    """Return the executor of a model, or of a rank's part of it.

    group: the rank's tensor group.
    beside: executor of another graph of the checkpoint. If the backend can share matrices, it holds identical ones
    once.
    later: receives the job that writes the packed weights to disk after loading, as happens by default. With None, they
    are written only on request.
    Raises InsufficientMemoryError or GraphError.
    """
    sizes = model_sizes(checkpoint, config, limits.max_model_len, graph)
    for note in size_notes(config, sizes):
        logger.warning("%s: %s", checkpoint.path, note)
    resident = _resident_bytes(config, checkpoint.path, sizes, limits.max_model_len)
    if resident is not None and config.num_ranks * config.data_parallel_size > 1:
        who = "a rank" if config.num_ranks > 1 else "a replica"
        raise InsufficientMemoryError(
            f"{checkpoint.path}: {who} needs {size(sizes.weight_bytes + sizes.workspace_bytes)}, but its share of the "
            f"memory is {size(memory_of_rank(config).usable_bytes)}. Several processes cannot run a model from disk: "
            "use more machines, a smaller model or one process"
        )
    compiler = (group or backend_of(config)).compile
    if isinstance(beside, _MatrixSharer) and beside.paging is None and beside.compile_beside is not None:
        compiler = beside.compile_beside
    executor = compiler(
        sizes,
        held(checkpoint, config, graph),
        limits,
        num_threads=threads_of_rank(config),
        progress=_quantizing(progress, config.quantization),
        pack_cache=_pack_cache(config, checkpoint, resident, later),
        kv_dtype=config.kv_dtype,
    )
    if executor.paging is not None:
        note = paging_note(executor.paging, executor.weight_bytes, checkpoint.config.num_layers)
        logger.warning("%s: %s", checkpoint.path, note)
    return executor


def _resident_bytes(config: EngineConfig, path: Path, sizes: Sizes, model_len: int) -> int | None:
    """Return the bytes of weights to keep in main memory, or None to keep all of them: see `resident_bytes`."""
    backend = backend_of(config)
    if not isinstance(sizes, SplitSizes) or not isinstance(backend, SplitBackend):
        return resident_bytes(config, path, sizes, memory_of_rank(config), model_len)
    logger.info("%s: %s%s", path, sizes.placement, f" ({sizes.reason})" if sizes.reason else "")
    config, here = part_in_main_memory(config, sizes)
    return resident_bytes(config, path, here, backend.cpu_memory(), model_len)


def _quantizing(progress: LoadProgress | None, method: str | None) -> LoadProgress | None:
    """Wrap `progress` so that the packing phase is named after the quantization method."""
    if progress is None or method is None:
        return progress
    return lambda phase, done, total: progress(f"quantizing to {method}" if phase == PACKING else phase, done, total)


def expected_paging(checkpoint: Checkpoint, config: EngineConfig, sizes: Sizes, resident: int) -> Paging:
    """Estimate the paging of a model that is not loaded. This measures the disk for half a second.

    resident: see `PackCacheOptions`.
    """
    options = _pack_cache(config, checkpoint, resident)
    assert options is not None  # some of the weights may stay in memory
    weights, sample = held(checkpoint, config, sizes.graph), max(_files(checkpoint), key=_file_bytes)
    return backend_of(config).expected_paging(sizes, weights, options, sample)


def _files(checkpoint: Checkpoint) -> set[Path]:
    return {tensor.file for tensor in checkpoint.file.tensors.values()}


def _file_bytes(path: Path) -> int:
    return path.stat().st_size


def _pack_cache(
    config: EngineConfig, checkpoint: Checkpoint, resident: int | None, later: list[KeepJob] | None = None
) -> PackCacheOptions | None:
    if config.pack_cache or resident is not None or config.data_parallel_size > 1:
        later = None
    if resident is None and not config.pack_cache and (later is None or config.pack_cache is False):
        return None
    identity = checkpoint.file.identity()
    if identity is None and resident is not None:  # the model cannot run without it
        time.sleep(_RACY_S)
        identity = checkpoint.file.identity()
    if identity is None:
        logger.info("%s changed just now: a later start will keep its packed weights", checkpoint.path)
        return None
    limit = config.pack_cache_bytes if later is None else min(config.pack_cache_bytes, tenth_of_disk())
    return PackCacheOptions(identity, limit, resident, later)
