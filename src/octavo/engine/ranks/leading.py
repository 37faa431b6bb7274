"""Rank 0 of a model, the leader: it starts or awaits the other ranks and runs them behind its executor."""

from __future__ import annotations

import logging
import secrets
from dataclasses import replace

from octavo import env
from octavo.backends import ExecutorLimits
from octavo.backends.rank_segments import remove_segments
from octavo.config import EngineConfig, LoadProgress
from octavo.distributed.executor import GroupExecutor
from octavo.distributed.leader import Leader
from octavo.distributed.patience import Patience
from octavo.distributed.rank_messages import Joining, Loaded, Setup
from octavo.distributed.ranks import Ranks, rank_graph
from octavo.distributed.rendezvous import accept_ranks, address_of
from octavo.engine.loading.compile_graph import compile_graph
from octavo.engine.loading.devices import of_rank
from octavo.engine.loading.model_graph import steps_of
from octavo.engine.ranks.joining import OTHERS_S, join, settled
from octavo.engine.ranks.rank_ray import lead_on_ray
from octavo.errors import EngineDeadError
from octavo.graph.builder import Graph
from octavo.loader.checkpoint import Checkpoint

logger = logging.getLogger(__name__)


def lead(
    config: EngineConfig,
    checkpoint: Checkpoint,
    graph: Graph,
    limits: ExecutorLimits,
    progress: LoadProgress | None,
    taps: tuple[int, ...] = (),
) -> GroupExecutor:
    """Return the executor of all ranks, with their processes. Raises what a rank raises.

    graph: the whole model's graph. Its tap returns the inputs of the layers `taps`.
    """
    ranks = Ranks.of(config)
    leader, name = Leader(), secrets.token_hex(8)
    try:
        if config.distributed_executor == "ray":
            config = lead_on_ray(config, leader)
        else:
            leader.spawn(config.ranks_here[1:])
            _admit_other_machines(config, leader)
        for rank in range(1, ranks.count):
            leader.send(_setup(config, checkpoint, rank, f"{name}-{ranks.stage(rank)}", limits, taps), [rank])
        part = rank_graph(graph, ranks, 0, steps_of(checkpoint, config, graph))
        for rank in range(1, ranks.count):
            leader.receive(rank, Joining)
        leader.send(Joining())
        config = settled(config, 0)
        group = join(config, part, ranks, 0, f"{name}-{ranks.stage(0)}", lambda: str(leader.failure or ""))
        local = compile_graph(config, checkpoint, part, limits, _watched(progress, leader), group)
        loaded = [leader.receive(rank, Loaded) for rank in range(1, ranks.count)]
        sizes = local.cache_sizes
        largest = replace(
            sizes,
            block_token_bytes=max([sizes.block_token_bytes, *(each.block_token_bytes for each in loaded)]),
            token_bytes=max([sizes.token_bytes, *(each.token_bytes for each in loaded)]),
            state_bytes=max([sizes.state_bytes, *(each.state_bytes for each in loaded)]),
            num_parts=ranks.count,
        )
        weight_bytes = local.weight_bytes + sum(each.weight_bytes for each in loaded)
        available_bytes = min(each.available_bytes for each in loaded)
        leader.patience = Patience((node.op for node in part.nodes), ranks.pipeline_parallel)
        return GroupExecutor(local, leader, ranks, group, largest, weight_bytes, available_bytes)
    except BaseException as error:
        leader.close()
        remove_segments(name)  # left by ranks that were killed before they met
        if isinstance(error, EngineDeadError):
            leader.check()  # raises the first reason
        raise


def _watched(progress: LoadProgress | None, leader: Leader) -> LoadProgress:
    """Wrap `progress` so that it raises another rank's failure while this rank packs weights.

    Packing may take minutes.
    """

    def report(phase: str, done: int, total: int) -> None:
        leader.check()
        if progress is not None:
            progress(phase, done, total)

    return report


def _admit_other_machines(config: EngineConfig, leader: Leader) -> None:
    others = range(len(config.ranks_here), config.num_ranks)
    if others:
        assert config.master is not None  # checked with nnodes
        logger.info("waiting for %d ranks on other machines at %s", len(others), config.master)
        address = address_of(config.master)
        for rank, connection in accept_ranks(address, env.cluster_token(), others, OTHERS_S).items():
            leader.admit(rank, connection)


def _setup(
    config: EngineConfig, checkpoint: Checkpoint, rank: int, group: str, limits: ExecutorLimits, taps: tuple[int, ...]
) -> Setup:
    """Return the setup of a rank.

    A rank on this machine finds the model at the same path. A rank on another machine uses its own name for the model.
    """
    node = rank // len(config.ranks_here)
    model = str(checkpoint.path) if node == 0 else config.model
    digest = checkpoint.file.digest() if node > 0 else ""
    if config.distributed_executor != "ray":  # Ray has no node_rank
        config = replace(config, node_rank=node)
    own = of_rank(replace(config, model=model), rank)
    return Setup(own, rank, group, limits.max_model_len, limits.max_num_outputs, taps, digest)
