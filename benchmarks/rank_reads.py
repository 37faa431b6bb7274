"""Pages that each rank reads, as parts of the file of a model: `python benchmarks/rank_reads.py MODEL.gguf --tensor 2`.

The file is dropped from the system's cache, a rank loads its part, and the pages that the cache then has are counted.
With --random the system reads no pages ahead. Copy the file first if other programs may have it open.
"""

from __future__ import annotations

import argparse
import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import repository  # noqa: F401

from octavo.backends import cpu
from octavo.backends.parameters import weight_of
from octavo.config import EngineConfig
from octavo.distributed.ranks import Ranks, rank_graph
from octavo.engine.loading.model_graph import executor_limits, model_graph, steps_of
from octavo.loader.checkpoint import Checkpoint, open_checkpoint
from tests.support.page_cache import cached_bytes, drop, read_nothing_ahead


def load(checkpoint: Checkpoint, ranks: Ranks, rank: int) -> float:
    """Load the part of a rank, and return its share of the weights."""
    config = EngineConfig(num_threads=1)
    graph = model_graph(checkpoint, 256)
    part = rank_graph(graph, ranks, rank, steps_of(checkpoint, config, graph))
    name, size = f"{secrets.token_hex(8)}-0", ranks.tensor_parallel
    with ThreadPoolExecutor(size) as pool:
        groups = list(pool.map(lambda each: cpu.join_group(name, each, size, 1 << 20), range(size)))
    limits = executor_limits(config, 256, graph)
    groups[ranks.part(rank)].compile(part, checkpoint.weights, limits, num_threads=1).close()
    own, whole = (sum(weight_of(checkpoint.weights, p).nbytes for p in each.parameters) for each in (part, graph))
    return own / whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a file")
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--random", action="store_true", help="no pages are read ahead")
    arguments = parser.parse_args()
    ranks = Ranks(arguments.tensor, arguments.pipeline)
    for rank in range(ranks.count):
        drop(arguments.model)
        with closing(open_checkpoint(arguments.model)) as checkpoint:
            if arguments.random:
                read_nothing_ahead(checkpoint)
            share = load(checkpoint, ranks, rank)
            data = np.memmap(arguments.model, np.uint8, "r")
            read = cached_bytes(data) / data.nbytes
            print(f"rank {rank}: {share:.3f} of the weights; pages read: {read:.3f} of the file")


if __name__ == "__main__":
    main()
