"""Loads the encoder of a model that reads a text before it answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.backends import Executor, ExecutorLimits
from octavo.engine.limits import NO_SOURCES, SourceLimits
from octavo.engine.loading.compile_graph import compile_graph
from octavo.engine.loading.devices import backend_name
from octavo.engine.loading.model_graph import max_source_rows, model_sizes
from octavo.errors import GraphError, ModelLoadError, UsageError
from octavo.graph.source import source_width
from octavo.models import build_encoder_graph
from octavo.speculative_config import SpeculativeConfig

if TYPE_CHECKING:
    from octavo.backends.memory import Sizes
    from octavo.config import EngineConfig
    from octavo.engine.encoding.encodings import Encodings
    from octavo.graph.builder import Graph
    from octavo.loader.checkpoint import Checkpoint


def check_options(config: EngineConfig, graph: Graph) -> None:
    """Raise UsageError for an option that a model with a source encoder does not support."""
    if not source_width(graph):
        return
    given = {
        "tensor_parallel_size": config.tensor_parallel_size > 1,
        "pipeline_parallel_size": config.pipeline_parallel_size > 1,
        "prompt_cache_dir": config.prompt_cache_dir is not None,
        "host_cache_memory": config.host_cache_memory is not None,
        "enable_lora": config.takes_adapters,
        "speculative_config": SpeculativeConfig.of(config).model is not None,
    }
    for name, is_given in given.items():
        if is_given:
            raise UsageError(f"{name} is not supported for a model with an encoder and a decoder: leave it out")


def source_limits(config: EngineConfig, checkpoint: Checkpoint, graph: Graph, model_len: int) -> SourceLimits:
    """Return the limits for the source texts that a model reads."""
    if not (width := source_width(graph)):
        return NO_SOURCES
    start = checkpoint.config.start_token_id  # type: ignore[attr-defined]
    return SourceLimits(width=width, start_token_id=start, max_rows=max_source_rows(config, model_len))


def encoder_graph(checkpoint: Checkpoint) -> Graph:
    """Return the graph of the encoder. Raises ModelLoadError if the weights do not fit it."""
    try:
        return build_encoder_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes)
    except GraphError as error:
        raise ModelLoadError(f"{checkpoint.path}: the encoder: {error}") from error


def encoder_limits(config: EngineConfig, model_len: int) -> ExecutorLimits:
    """Return the limits of the encoder's steps."""
    rows = max_source_rows(config, model_len)
    return ExecutorLimits(rows, config.max_num_seqs, rows, rows, max_logits_rows=1)


def encoder_bytes(config: EngineConfig, checkpoint: Checkpoint, decoder: Sizes, model_len: int) -> int:
    """Return the encoder's memory, or 0 if there is no encoder.

    Matrices shared with the decoder are not included, because the decoder holds them.
    """
    if not source_width(decoder.graph):
        return 0
    graph, limits = encoder_graph(checkpoint), encoder_limits(config, model_len)
    sizes = model_sizes(checkpoint, config, model_len, graph, limits=limits)
    shares = backend_name(config) == "cpu"  # other devices hold shared matrices twice
    shared = {parameter.name for parameter in decoder.weights} if shares else set()
    own = sum(count for parameter, count in sizes.weights.items() if parameter.name not in shared)
    return own + sizes.workspace_bytes


def load_sources(
    config: EngineConfig, checkpoint: Checkpoint, graph: Graph, decoder: Executor, model_len: int
) -> Encodings:
    """Compile the encoder with this graph, and return it with an empty cache of rows.

    decoder: executor that holds the shared matrices.
    """
    from octavo.engine.encoding.encodings import Encodings
    from octavo.engine.encoding.source_encoder import SourceEncoder

    limits = encoder_limits(config, model_len)
    executor = compile_graph(config, checkpoint, graph, limits, None, beside=decoder)
    executor.allocate_cache(1, config.block_size)
    return Encodings(SourceEncoder(executor, limits.max_num_batched_tokens), config.media_cache_bytes)
