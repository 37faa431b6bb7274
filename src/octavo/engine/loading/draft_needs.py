"""The memory that a draft model needs and the speed it may gain, calculated from the headers of both models."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.backends.memory import Sizes
from octavo.config import EngineConfig
from octavo.engine.loading.devices import backend_name
from octavo.engine.loading.draft_model import (
    DraftModel,
    beside_head,
    check_draft,
    draft_config,
    is_separate_head,
    own_head,
    separate_head,
)
from octavo.engine.loading.model_graph import executor_limits, model_graph, model_sizes
from octavo.graph.cost import graph_cost
from octavo.graph.ops.base import StepSizes
from octavo.loader.checkpoint import Checkpoint

_RIGHT = 0.8  # assumed share of right guesses
_ROW_COST = 0.04  # assumed cost of a further row of a step


@dataclass(frozen=True, slots=True)
class DraftNeeds:
    """The needs of a draft model. Sizes are in bytes.

    cost: time of a guess as a fraction of a step of the target, estimated from the bytes that both read.
    is_head: the draft model is part of the target.
    workspace_bytes: for a head, includes the growth of the target's own workspace.
    gain: factor on one user's tokens per second, if 8 of 10 guesses are right and a row of a step costs 4 %.
    """

    model: str
    num_parameters: int
    weight_bytes: int
    workspace_bytes: int
    kv_bytes_per_token: int
    block_token_bytes: int  # per token in a block of the target's cache, including its twin
    cost: float
    gain: float
    kv_bytes: int = 0  # for all users of a plan
    is_head: bool = False


def draft_needs(config: EngineConfig, target: Checkpoint, draft: Checkpoint, name: str, context: int) -> DraftNeeds:
    """Return the needs of a draft model that runs with the target's options.

    Raises UsageError for a model that cannot draft for the target.
    """
    graph = model_graph(draft, context)
    check_draft(draft, graph, target.config.vocab_size, name)
    sizes = model_sizes(draft, draft_config(config, name), context, graph)
    return _needs(name, sizes, draft.num_parameters, model_sizes(target, config, context), context)


def head_needs(config: EngineConfig, checkpoint: Checkpoint, context: int) -> DraftNeeds | None:
    """Return the needs of the model's own head, or None if there is none or it is not used. Raises like `own_head`."""
    head = own_head(config, checkpoint, context)
    if head is None:
        return None
    return replace(_needs_of_head("head", config, checkpoint, head, context), is_head=True)


def separate_head_needs(
    config: EngineConfig, checkpoint: Checkpoint, path: Path, name: str, context: int
) -> DraftNeeds | None:
    """Return the needs of the EAGLE-3 head or assistant in `path`, or None without one. Raises like `separate_head`."""
    if not is_separate_head(path):
        return None
    with closing(separate_head(config, checkpoint, model_graph(checkpoint, context), path, context)) as head:
        return _needs_of_head(name, config, checkpoint, head, context)


def _needs_of_head(
    name: str, config: EngineConfig, checkpoint: Checkpoint, draft: DraftModel, context: int
) -> DraftNeeds:
    assert draft.head is not None
    graph = model_graph(checkpoint, context)
    tapped, wide = draft.head.tapped(graph), beside_head(executor_limits(config, context, graph))
    target = model_sizes(checkpoint, config, context, graph)
    wider = model_sizes(checkpoint, config, context, tapped, limits=wide)
    sizes = model_sizes(draft.checkpoint, draft.config, context, draft.graph)
    count = sum(math.prod(parameter.shape) for parameter in draft.graph.parameters)
    needs = _needs(name, sizes, count, target, context)
    shared = 0
    if backend_name(config) == "cpu" and config.num_ranks == 1:  # here the head shares the model's matrices
        shared = sum(size for p, size in sizes.weights.items() if p.is_matrix and p in target.weights)
    more = wider.workspace_bytes - target.workspace_bytes
    weight_bytes = needs.weight_bytes - shared
    return replace(needs, weight_bytes=weight_bytes, workspace_bytes=needs.workspace_bytes + more)


def _needs(name: str, sizes: Sizes, num_parameters: int, target: Sizes, context: int) -> DraftNeeds:
    cost = _bytes_read(sizes, context) / _bytes_read(target, context)
    expected = ((1 - _RIGHT ** (count + 1)) / (1 - _RIGHT) / (1 + count * (_ROW_COST + cost)) for count in range(1, 9))
    return DraftNeeds(
        model=name,
        num_parameters=num_parameters,
        weight_bytes=sizes.weight_bytes,
        workspace_bytes=sizes.workspace_bytes,
        kv_bytes_per_token=sizes.cache.token_bytes,
        block_token_bytes=sizes.cache.block_token_bytes,
        cost=cost,
        gain=max(expected),
    )


def _bytes_read(sizes: Sizes, context: int) -> int:
    """Return the bytes read by a step with one token."""
    return graph_cost(sizes.graph, StepSizes(1, 1, 1, context, sizes.kv_element_bytes), sizes.weights).bytes_read
