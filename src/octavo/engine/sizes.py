"""The memory that a model will take, from its headers and from the backend that will run it."""

from __future__ import annotations

from octavo.backends import ExecutorLimits, get_backend
from octavo.backends.memory import MemoryBudget
from octavo.backends.sizes import Sizes
from octavo.config import EngineConfig
from octavo.engine.progress import size
from octavo.graph.builder import Graph
from octavo.loader.checkpoint import Checkpoint
from octavo.models import build_graph

# Rows of logits beside those of the running sequences, for prompt log-probabilities.
_EXTRA_OUTPUTS = 16


def executor_limits(config: EngineConfig, model_len: int) -> ExecutorLimits:
    """The limits of the engine's steps. model_len: tokens of the longest request."""
    return ExecutorLimits(
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_num_outputs=config.max_num_seqs + _EXTRA_OUTPUTS,
        max_model_len=model_len,
    )


def model_sizes(checkpoint: Checkpoint, config: EngineConfig, context: int, graph: Graph | None = None) -> Sizes:
    """The sizes on the backend of `config`. context: tokens of the longest request. graph: the model's, if known.

    Raises GraphError if the weights do not fit the configuration.
    """
    if graph is None:
        graph = build_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes)
    return get_backend(config.backend).sizes(
        graph,
        checkpoint.weights,
        executor_limits(config, context),
        num_threads=config.num_threads,
        kv_dtype=config.kv_dtype,
    )


def free_memory(config: EngineConfig) -> MemoryBudget:
    """The free memory of the device of `config`'s backend."""
    return get_backend(config.backend).memory()


def growth_notes(sizes: Sizes) -> list[str]:
    """A sentence for each type whose weights take more memory than in the file, with the factor."""
    return [
        f"{grown.type_name} has no kernel of its own: its weights are kept as {grown.packed_as} and take "
        f"{grown.factor:.1f} times their size in the file, {size(grown.packed_bytes)} instead of "
        f"{size(grown.stored_bytes)}"
        for grown in sizes.grown
    ]
