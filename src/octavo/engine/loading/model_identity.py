"""The identity of a loaded model's cache: everything in files, graph and options that its blocks depend on."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import TYPE_CHECKING

from octavo import __version__
from octavo.backends.split_executor import SplitExecutor
from octavo.engine.kv.cache_identity import CacheIdentity
from octavo.engine.loading.devices import backend_name, backend_of

if TYPE_CHECKING:
    from octavo.backends import Executor
    from octavo.config import EngineConfig
    from octavo.graph.builder import Graph
    from octavo.loader.checkpoint import Checkpoint

_LAYOUT = 1  # incremented when the order of numbers in a block changes


def cache_identity(config: EngineConfig, checkpoint: Checkpoint, graph: Graph, executor: Executor) -> CacheIdentity:
    """Return the identity of the cache.

    Files that have just been written cannot be identified by their time stamps yet; the result is then
    `CacheIdentity.unique`.
    graph: the whole model's graph.
    """
    content = checkpoint.file.identity()
    if content is None:
        return CacheIdentity.unique()
    operations = (f"{node.layer} {node.op}" for node in graph.nodes)  # rope, windows, names of weights and so on
    model = [content, checkpoint.architecture, config.dtype, config.quantization, *operations]
    described, sizes = backend_of(config).describe(), executor.cache_sizes
    layout = [
        (_LAYOUT, __version__, config.block_size, config.kv_dtype, sizes),  # `sizes` has groups and types of layers
        # Other kernels, and other parts of a model, round sums in another order.
        (backend_name(config), described.kernels, described.products, config.deterministic),
        (config.tensor_parallel_size, config.pipeline_parallel_size, config.enable_expert_parallel),
        config.takes_adapters,  # with adapters, fewer operations are fused
        executor.sizes.placement if isinstance(executor, SplitExecutor) else None,
    ]
    return CacheIdentity(_digest(model), _digest(layout))


def _digest(parts: Iterable[object]) -> bytes:
    found = blake2b(digest_size=32)
    for part in parts:
        found.update(repr(part).encode() + b"\n")
    return found.digest()
