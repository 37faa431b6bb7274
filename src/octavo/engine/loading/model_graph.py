"""A checkpoint's graph and sizes, its weights in the configured types, and the limits of its steps."""

from __future__ import annotations

from octavo.backends import Backend, ExecutorLimits
from octavo.backends.memory import Sizes
from octavo.backends.parameters import column_step
from octavo.config import EngineConfig
from octavo.engine.loading.devices import backend_of, step_tokens
from octavo.engine.loading.held_weights import held_weights
from octavo.errors import GraphError, ModelLoadError
from octavo.graph.builder import Graph
from octavo.graph.ops.encoder import MaxPool, MeanPool
from octavo.graph.ops.low_rank import AdapterLimits
from octavo.graph.shard_wishes import Steps
from octavo.graph.source import SOURCE, source_width
from octavo.graph.spans import SPANS, longest_span, span_width, with_sight
from octavo.graph.values import TOKENS, RowDomain
from octavo.loader.checkpoint import Checkpoint
from octavo.loader.tensor_files import Weights
from octavo.models import build_graph

_EXTRA_OUTPUTS = 16  # in addition to one per running sequence
_MAX_LOGITS_ROWS = 128  # rows of logits held at once; a prompt's log-probabilities need more


def model_graph(checkpoint: Checkpoint, context: int) -> Graph:
    """Return the model's graph for sequences of at most `context` tokens.

    Raises ModelLoadError if its weights do not fit it, or if it has caches that the engine cannot fill.
    """
    config, classifies = checkpoint.config.for_length(context), checkpoint.pooling.is_classifier
    try:
        graph = build_graph(checkpoint.architecture, config, checkpoint.weights.shapes, classifies=classifies)
        if checkpoint.sight is not None:
            graph = with_sight(graph, checkpoint.sight)
    except GraphError as error:  # a weight is missing or has another shape than the configuration says
        raise ModelLoadError(f"{checkpoint.path}: {error}") from error
    for cache in graph.kv_caches:
        if cache.domain not in (TOKENS, SOURCE):
            raise ModelLoadError(
                f"{checkpoint.path}: layer {cache.layer} has a cache of {cache.domain.name}, but the engine allocates "
                "blocks only for tokens and sources. Run the graph on an executor with your own lengths and slots"
            )
    return graph


def executor_limits(config: EngineConfig, model_len: int, graph: Graph) -> ExecutorLimits:
    """Return the limits of the engine's steps. An encoder processes the longest request in one step.

    model_len: tokens of the longest request.
    """
    step, outputs = step_tokens(config), config.max_num_seqs + _EXTRA_OUTPUTS
    tokens = max(step, model_len) if graph.takes_whole_texts else step
    # A model that pools by itself returns one row per text; others may return one for every token.
    each_token = not any(isinstance(node.op, MeanPool | MaxPool) for node in graph.nodes)
    if span := longest_span(graph):
        tokens = max(tokens, min(span, model_len) + config.max_num_seqs)
    return ExecutorLimits(
        max_num_batched_tokens=tokens,
        max_num_seqs=config.max_num_seqs,
        max_num_outputs=max(step if graph.generates else tokens, outputs) if each_token else outputs,
        max_model_len=model_len,
        max_logits_rows=min(outputs, _MAX_LOGITS_ROWS),
        further_rows=_further_rows(graph, tokens, max_source_rows(config, model_len)),
        adapters=AdapterLimits(config.max_loras, config.max_lora_rank) if config.takes_adapters else None,
    )


def max_source_rows(config: EngineConfig, model_len: int) -> int:
    """Return the most source rows per step: the tokens of a step, but at least the longest source."""
    return max(step_tokens(config), model_len)


def _further_rows(graph: Graph, span_rows: int, source_rows: int) -> dict[RowDomain, int]:
    """Return the most rows per step in each domain other than tokens."""
    if source_width(graph):
        return {SOURCE: source_rows}
    return {SPANS: span_rows} if span_width(graph) else {}


def held(checkpoint: Checkpoint, config: EngineConfig, graph: Graph) -> Weights:
    """Return the weights in the types that the options ask for."""
    return held_weights(checkpoint, graph, config.dtype, config.quantization)


def model_sizes(
    checkpoint: Checkpoint,
    config: EngineConfig,
    context: int,
    graph: Graph | None = None,
    backend: Backend | None = None,
    limits: ExecutorLimits | None = None,
) -> Sizes:
    """Return the model's sizes on a backend.

    context: tokens of the longest request.
    graph: the model's graph, if it has been built already.
    backend: by default, the backend that `config` selects.
    limits: limits of its steps; None for the options' limits.
    Raises ModelLoadError if the weights do not fit the configuration.
    """
    if graph is None:
        graph = model_graph(checkpoint, context)
    return (backend or backend_of(config)).sizes(
        graph,
        held(checkpoint, config, graph),
        limits or executor_limits(config, context, graph),
        num_threads=config.num_threads,
        kv_dtype=config.kv_dtype,
    )


def steps_of(checkpoint: Checkpoint, config: EngineConfig, graph: Graph) -> Steps:
    """Return the columns at which a model's weights can be split."""
    weights = held(checkpoint, config, graph)
    return lambda parameter: column_step(weights, parameter.name)
