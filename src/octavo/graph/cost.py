"""Bytes and FLOPs of a graph for any number of tokens, requests, outputs and context."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from octavo.graph.builder import Graph, Node
from octavo.graph.cache import StateCache
from octavo.graph.ops.base import Op, StepSizes
from octavo.graph.ops.moe import MoE
from octavo.graph.values import Parameter, Value


@dataclass(frozen=True, slots=True)
class Cost:
    """The bytes and FLOPs of a step. Weights are counted once, activations and cache once per access by an operation.

    activation_bytes: the bytes that operations pass to each other, which stay in the processor's caches.
    """

    bytes_read: int = 0
    bytes_written: int = 0
    flops: int = 0
    activation_bytes: int = 0


def node_cost(node: Node, sizes: StepSizes, weight_bytes: Mapping[Parameter, int]) -> Cost:
    """Return the cost of one operation.

    weight_bytes: size of each parameter in memory.
    """
    op = node.op
    cache_read, cache_written = _cache_bytes(op, sizes)
    inputs, output = (_activation_bytes(values, sizes) for values in (op.inputs, (node.output,)))
    weights = sum(int(weight_bytes[p] * op.weight_fraction(p, sizes)) for p in op.parameters)
    return Cost(inputs + weights + cache_read, output + cache_written, op.flops(sizes), inputs + output)


def graph_cost(graph: Graph, sizes: StepSizes, weight_bytes: Mapping[Parameter, int]) -> Cost:
    """Return the cost of a step: the sum over all operations."""
    costs = [node_cost(node, sizes, weight_bytes) for node in graph.nodes]
    return Cost(*(sum(getattr(cost, field.name) for cost in costs) for field in fields(Cost)))


def weight_bytes_read(graph: Graph, sizes: StepSizes, weight_bytes: Mapping[Parameter, int]) -> dict[Parameter, int]:
    """Return the bytes of each weight that a step reads, counted once however often operations use it."""
    read: dict[Parameter, int] = {}
    for node in graph.nodes:
        for p in node.op.parameters:
            read[p] = max(int(weight_bytes[p] * node.op.weight_fraction(p, sizes)), read.get(p, 0))
    return read


@dataclass(frozen=True, slots=True)
class ExpertCost:
    """The experts of a mixture: how many each layer has, how many a token uses, and the bytes that this saves.

    num_bytes: size of all experts of all layers in memory.
    bytes_read: bytes of the experts that one token reads.
    inactive_parameters: parameters of the experts that a token does not use.
    """

    num_experts: int
    num_active: int
    num_bytes: int
    bytes_read: int
    inactive_parameters: int


def expert_cost(graph: Graph, weight_bytes: Mapping[Parameter, int]) -> ExpertCost | None:
    """Return the cost of a model's experts, or None if it has none.

    weight_bytes: size of each parameter in memory.
    If layers differ in the number of experts, the largest number is used.
    """
    layers = [node.op for node in graph.nodes if isinstance(node.op, MoE)]
    if not layers:
        return None
    shares = {p: op.routing.top_k / op.num_choices for op in layers for p in op.expert_parameters}
    largest = max(layers, key=lambda op: op.num_experts)
    return ExpertCost(
        num_experts=largest.num_experts,
        num_active=largest.routing.top_k,
        num_bytes=sum(weight_bytes[p] for p in shares),
        bytes_read=sum(int(weight_bytes[p] * share) for p, share in shares.items()),
        inactive_parameters=sum(round(math.prod(p.shape) * (1 - share)) for p, share in shares.items()),
    )


def _cache_bytes(op: Op, sizes: StepSizes) -> tuple[int, int]:
    """Return the bytes (read, written) of an operation's cache.

    The step reads the keys and values that its queries see, and writes the new tokens' keys and values. States are read
    and written completely.
    """
    cache = op.cache
    if cache is None:
        return 0, 0
    if isinstance(cache, StateCache):
        state = sizes.requests * cache.elements_per_sequence * sizes.element_bytes
        return state, state
    per_token = cache.elements_per_token * sizes.kv_element_bytes
    queries = sizes.tokens / max(sizes.requests, 1)
    if cache.chunked and cache.window is not None:
        seen = sizes.context - (sizes.context - queries) // cache.window * cache.window
    else:
        seen = sizes.context if cache.window is None else min(cache.window + queries - 1, sizes.context)
    return int(sizes.requests * seen * per_token), int(sizes.tokens * per_token) * op.owns_cache


def _activation_bytes(values: Iterable[Value], sizes: StepSizes) -> int:
    return sum(sizes.rows(value.rows) * value.cols for value in values) * sizes.element_bytes
