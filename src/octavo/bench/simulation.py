"""Computes a model's speed on many machines from its graph and a few figures for a machine and its link.

A rank's step takes as long as its memory reads or its arithmetic, whichever is longer, plus its exchanges. The ranks of
a stage wait for the widest one. If each rank holds whole experts, they wait for the one whose experts are chosen most
often; tokens are assumed to choose evenly and independently. Stages pass their values over the link. The real speed is
lower, because some things are left out: scheduling, sampling, uneven request lengths, experts that many tokens prefer,
other traffic on the link.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import NamedTuple

import numpy as np

from octavo.backends.memory import Sizes
from octavo.config import EngineConfig
from octavo.distributed.ranks import Ranks, rank_graph
from octavo.engine.loading.model_graph import model_graph, model_sizes, steps_of
from octavo.engine.loading.rank_needs import RankExchange, exchanges_of
from octavo.errors import UsageError
from octavo.graph.cost import graph_cost
from octavo.graph.ops.base import StepSizes
from octavo.graph.ops.moe import MoE
from octavo.graph.values import LOGITS, TOKENS
from octavo.loader.checkpoint import Checkpoint

_FLOAT_BYTES = 4
_STEP_TOKENS = 512  # tokens of a prompt per step
_MOST_DRAWS, _DRAWN_NUMBERS = 2000, 2_000_000


@dataclass(frozen=True, slots=True)
class Machines:
    """Identical machines, with one rank per socket, and the link between them.

    bandwidth: bytes per second that a socket reads from memory.
    compute: operations per second of a socket.
    efficiency: fraction of both that a step reaches.
    memory: bytes per socket.
    latency: seconds for a message to another machine.
    link: bytes per second of a machine's link.
    local_latency, local_link: the same between sockets.
    """

    sockets: int
    bandwidth: float
    compute: float
    memory: float
    efficiency: float = 0.7
    latency: float = 50e-6
    link: float = 1.25e9
    local_latency: float = 10e-6
    local_link: float = 10e9


@dataclass(frozen=True, slots=True)
class Load:
    """The load on the machines: a number of users, each with a context of the same length.

    whole_experts: each rank of a mixture holds whole experts instead of a part of every expert.
    whole_logits: tokens are sampled from all logits, which the ranks of a stage gather. Otherwise they are sampled from
        a few candidates per rank, whose cost is ignored.
    """

    context: int
    users: int
    whole_experts: bool = False
    whole_logits: bool = True


@dataclass(frozen=True, slots=True)
class Division:
    """One way to divide the machines. Rates are in tokens per second, the time to the first token in seconds.

    fits: the weights and the cache of all users fit.
    runs: tensor parallelism stays within machines.
    """

    nodes: int
    tensor_parallel: int
    pipeline_parallel: int
    replicas: int
    rank_bytes: int
    fits: bool
    runs: bool
    tokens_per_s_of_one: float
    tokens_per_s: float
    first_token_s: float


def simulate(
    checkpoint: Checkpoint, config: EngineConfig, machines: Machines, nodes: Sequence[int], load: Load
) -> list[Division]:
    """Return all ways to divide each of these numbers of machines.

    They are sorted by number of machines. For each number, divisions that run come first, then those that fit, then the
    fastest.

    Raises UsageError if there is none, or if whole experts are requested for a model without experts.
    """
    model = _Model(checkpoint, config, load)
    found = [choice for count in nodes for choice in _choices(model, machines, count, load.users)]
    if not found:
        raise UsageError(f"the model cannot be divided over {max(nodes)} machines; give a power of two")
    return sorted(found, key=lambda each: (each.nodes, not each.runs, not each.fits, -each.tokens_per_s))


def _choices(model: _Model, machines: Machines, nodes: int, users: int) -> Iterator[Division]:
    ranks = nodes * machines.sockets
    sizes = [1 << i for i in range(ranks.bit_length()) if ranks % (1 << i) == 0]
    for tensor in sizes:
        for pipeline in sizes:
            replicas, rest = divmod(ranks, tensor * pipeline)
            if rest == 0 and pipeline <= model.num_layers and replicas <= max(users, 1) and tensor <= model.max_tensor:
                yield _choice(model, machines, nodes, Ranks(tensor, pipeline, model.whole_experts), replicas, users)


def _choice(model: _Model, machines: Machines, nodes: int, ranks: Ranks, replicas: int, users: int) -> Division:
    runs = ranks.tensor_parallel <= machines.sockets
    of_replica = -(-users // replicas)
    # As many steps in flight as stages, each of its share of the users.
    rows = -(-of_replica // ranks.pipeline_parallel)
    alone, shared = (model.stage_seconds(machines, ranks, count, count) for count in (1, rows))
    prompt = model.stage_seconds(machines, ranks, min(_STEP_TOKENS, model.context), 1)
    num_steps = -(-model.context // _STEP_TOKENS)
    in_flight = min(ranks.pipeline_parallel, of_replica)
    rank_bytes = max(model.rank_bytes(ranks, stage, of_replica) for stage in range(ranks.pipeline_parallel))
    return Division(
        nodes,
        ranks.tensor_parallel,
        ranks.pipeline_parallel,
        replicas,
        rank_bytes,
        rank_bytes <= machines.memory,
        runs,
        1 / sum(alone),
        replicas * rows * min(in_flight / sum(shared), 1 / max(shared)),
        num_steps * sum(prompt),
    )


class _Model:
    """The parts of a model for any number of ranks, each computed once."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, load: Load) -> None:
        self._checkpoint, self._config, self.context = checkpoint, config, load.context
        self._graph = model_graph(checkpoint, load.context)
        experts = [node.op.num_experts for node in self._graph.nodes if isinstance(node.op, MoE)]
        if load.whole_experts and not experts:
            raise UsageError("enable_expert_parallel: this model has no experts; leave it out")
        self.whole_experts, self._whole_logits = load.whole_experts, load.whole_logits
        self.max_tensor = min(experts) if load.whole_experts else 1 << 30
        self._steps = steps_of(checkpoint, config, self._graph)
        self.num_layers = len({node.layer_index for node in self._graph.nodes} - {None})
        self._parts: dict[tuple[Ranks, int], _Part] = {}

    def stage_seconds(self, machines: Machines, ranks: Ranks, tokens: int, requests: int) -> list[float]:
        """Return the time of a step in each stage, including passing on its values."""
        return [
            self._part(ranks, stage).seconds(machines, ranks.tensor_parallel, tokens, requests, self.context)
            for stage in range(ranks.pipeline_parallel)
        ]

    def rank_bytes(self, ranks: Ranks, stage: int, users: int) -> int:
        part = self._part(ranks, stage)
        return part.weight_bytes + part.workspace_bytes + users * self.context * part.kv_bytes_per_token

    def _part(self, ranks: Ranks, stage: int) -> _Part:
        """Return the first rank of a stage; if parts are uneven, it is among the widest."""
        if (ranks, stage) not in self._parts:
            config = replace(self._config, tensor_parallel_size=1, pipeline_parallel_size=1)
            graph = rank_graph(self._graph, ranks, ranks.of_stage(stage)[0], self._steps)
            sizes = model_sizes(self._checkpoint, config, self.context, graph)
            exchanged = [each for each in exchanges_of(graph) if self._whole_logits or each.rows is not LOGITS]
            handed_on = sum(v.cols for v in graph.outputs) if stage < ranks.pipeline_parallel - 1 else 0
            self._parts[ranks, stage] = _Part(sizes, exchanged, handed_on)
        return self._parts[ranks, stage]


class _Part:
    """The graph of one rank with its sizes."""

    def __init__(self, sizes: Sizes, exchanged: list[RankExchange], handed_on: int) -> None:
        """Compute the sizes of a part.

        handed_on: columns passed to the next stage.
        """
        self._sizes, self._exchanged, self._handed_on = sizes, exchanged, handed_on
        self.weight_bytes, self.workspace_bytes = sizes.weight_bytes, sizes.workspace_bytes
        self.kv_bytes_per_token = sizes.cache.token_bytes

    def seconds(self, machines: Machines, ranks: int, tokens: int, requests: int, context: int) -> float:
        step = StepSizes(tokens, requests, requests, context, self._sizes.kv_element_bytes)
        cost = graph_cost(self._sizes.graph, step, self._sizes.weights)
        extra_bytes, extra_flops = self._of_busiest(tokens)
        moved = cost.bytes_read + cost.bytes_written - cost.activation_bytes + extra_bytes
        seconds = max(moved / machines.bandwidth, (cost.flops + extra_flops) / machines.compute) / machines.efficiency
        is_local = ranks <= machines.sockets
        latency = machines.local_latency if is_local else machines.latency
        rate = machines.local_link if is_local else machines.link
        for each in self._exchanged:  # all ranks meet once
            rows = tokens if each.rows is TOKENS else requests
            seconds += latency + rows * each.moved * _FLOAT_BYTES / rate
        if self._handed_on:
            seconds += machines.latency + tokens * self._handed_on * _FLOAT_BYTES / machines.link
        return seconds

    def _of_busiest(self, tokens: int) -> tuple[float, float]:
        """Return the bytes and operations beyond an even share for the rank whose experts are chosen most often."""
        extra_bytes = extra_flops = 0.0
        for node in self._sizes.graph.nodes:
            op = node.op
            if not isinstance(op, MoE) or op.gate.shape[0] == op.num_experts:
                continue
            held, top_k, identities = op.gate.shape[0], op.routing.top_k, op.routing.num_identities
            busiest = busiest_rank(tokens, top_k, op.num_experts, held, identities)
            num_bytes = sum(self._sizes.weights[p] for p in op.expert_parameters)
            even = op.weight_fraction(op.gate, StepSizes(tokens, tokens, tokens, 1))
            extra_bytes += num_bytes * (busiest.experts / held - even)
            extra_flops += 6 * prod(op.gate.shape[1:]) * (busiest.pairs - tokens * top_k * held / op.num_choices)
        return extra_bytes, extra_flops


class Busiest(NamedTuple):
    """The average load of the busiest rank: experts chosen by any token, and pairs of a token and an expert."""

    experts: float
    pairs: float


@cache
def busiest_rank(tokens: int, top_k: int, experts: int, held: int, identities: int = 0) -> Busiest:
    """Simulate the busiest rank if each token chooses `top_k` of the experts and identities, evenly and independently.

    Each rank holds `held` neighbouring experts. The result is an average over draws from a fixed seed, accurate to a
    few per cent.
    """
    rng = np.random.default_rng(0)
    choices = experts + identities
    draws = min(_MOST_DRAWS, max(8, _DRAWN_NUMBERS // (tokens * choices)))
    first_of_rank = np.arange(0, experts, held)
    most = np.zeros(2)
    for _ in range(draws):
        chosen = np.argpartition(rng.random((tokens, choices), np.float32), top_k - 1, axis=1)[:, :top_k]
        counts = np.bincount(chosen.ravel(), minlength=choices)[:experts]
        most += [np.add.reduceat(each, first_of_rank).max() for each in (counts > 0, counts)]
    return Busiest(*(most / draws).tolist())
