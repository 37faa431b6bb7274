"""Prepares a rank to join the other ranks: its NUMA node, its compute threads, and its group."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from octavo.backends import RankGroup
from octavo.config import EngineConfig
from octavo.distributed.ranks import Ranks
from octavo.engine.loading.devices import backend_name, backend_of, threads_of_rank
from octavo.graph.builder import Graph
from octavo.platform import numa, processors

logger = logging.getLogger(__name__)

EXCHANGE_BYTES = 1 << 20  # of memory for exchanging values; more would not fit the CPU caches
OTHERS_S = 300.0  # wait for the ranks of all machines


def settled(config: EngineConfig, rank: int) -> EngineConfig:
    """Return the options with the number of compute threads set. Binds this thread and those it starts to a NUMA node.

    Nothing is bound if this machine's ranks do not divide the nodes evenly, or with several replicas, Ray or a GPU.
    """
    threads, here = threads_of_rank(config), len(config.ranks_here)
    config = replace(config, num_threads=threads)
    if config.data_parallel_size > 1 or config.distributed_executor == "ray" or backend_name(config) != "cpu":
        return config
    cpus = numa.cpus_of_process(rank % here, here, threads)
    if cpus is not None:
        try:
            processors.bind(cpus)
        except OSError as error:  # a container may forbid it
            logger.warning("rank %d is not bound to a NUMA node, and may be slower: %s", rank, error.strerror)
            return config
        logger.info("rank %d runs on CPUs %s of one NUMA node", rank, ", ".join(map(str, sorted(cpus))))
    return config


def join(
    config: EngineConfig,
    graph: Graph,
    ranks: Ranks,
    rank: int,
    name: str,
    given_up: Callable[[], str] | None = None,
) -> RankGroup | None:
    """Join and return the group of this rank's stage, or return None if the rank is alone in it.

    given_up: returns a reason to stop waiting, or an empty string.
    """
    if ranks.tensor_parallel == 1:
        return None
    row_bytes = 4 * max(node.output.cols for node in graph.nodes)
    size = ranks.tensor_parallel
    num_bytes = max(row_bytes, EXCHANGE_BYTES)
    return backend_of(config).join_group(name, ranks.part(rank), size, num_bytes, given_up)
