"""The adapters of a loaded model, including those named by its options."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.backends import AdaptingExecutor, Executor, ExecutorLimits
from octavo.backends.memory import host_memory
from octavo.config import EngineConfig
from octavo.errors import UsageError
from octavo.graph.builder import Graph
from octavo.loader.checkpoint import Checkpoint

if TYPE_CHECKING:
    from octavo.adapters.registry import AdapterRegistry

_SHARE = 0.1  # share of the memory that a loaded model leaves free


def adapter_registry(
    config: EngineConfig, checkpoint: Checkpoint, graph: Graph, executor: Executor, limits: ExecutorLimits
) -> AdapterRegistry | None:
    """Return the adapters of an engine, with `lora_modules` loaded, or None if its options do not enable adapters.

    graph: the whole model's graph.
    Raises ModelLoadError naming what does not fit, and UsageError if the executor does not support adapters.
    """
    if limits.adapters is None:
        return None
    if not isinstance(executor, AdaptingExecutor):
        raise UsageError("enable_lora: adapters are not supported with these options yet; leave it out")
    from octavo.adapters.adapter import AdapterBase
    from octavo.adapters.registry import AdapterRegistry

    base = AdapterBase.of(checkpoint.architecture, checkpoint.config, graph, checkpoint.weights)
    base = replace(base, path=checkpoint.path)  # the model's own files are closed after loading
    max_bytes = int(host_memory().usable_bytes * _SHARE)
    registry = AdapterRegistry(base, executor, limits.adapters, config.max_cpu_loras, max_bytes)
    for name, (path, scale) in config.adapters.items():
        registry.add(name, path, scale)
    registry.default = config.default_lora or ""
    return registry
