"""Pages of a file that ranks read: those in the cache of the system once a rank has loaded its part."""

from __future__ import annotations

import mmap
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.backends import ExecutorLimits, cpu
from octavo.backends.parameters import weight_of
from octavo.config import EngineConfig
from octavo.distributed.ranks import Ranks, rank_graph
from octavo.engine.loading.model_graph import model_graph, steps_of
from octavo.graph.builder import Graph
from octavo.loader.checkpoint import Checkpoint, open_checkpoint
from octavo.quantization.packed import DenseWeight
from tests.support.page_cache import cached_bytes, read_nothing_ahead
from tests.support.quantized_checkpoints import tiny_model
from tests.support.tiny_models import save_safetensors

LIMITS = ExecutorLimits(64, 4, 64, 64)
SLACK = 4 * mmap.PAGESIZE  # of a tensor and of its part both ends are within a page
SMALL = 1 << 18  # bytes: the pages of the header and of what follows it are read with it


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """32 MB, with rows of 2 and 8 KiB."""
    return save_safetensors(tiny_model(512, 2048, 8, 4), tmp_path_factory.mktemp("model"))


@pytest.fixture
def cold(model: Path) -> Iterator[Checkpoint]:
    """The model, of which the cache has little more than the header. The system reads no pages ahead."""
    checkpoint = open_checkpoint(model)
    (path,) = checkpoint.file.paths
    read_nothing_ahead(checkpoint)
    if cached_bytes(np.memmap(path, np.uint8, "r")) > SMALL:
        pytest.skip("this file system keeps files in memory")
    yield checkpoint
    checkpoint.close()


def load(checkpoint: Checkpoint, ranks: Ranks, rank: int) -> Graph:
    """The graph of the rank, whose weights have been loaded."""
    graph = model_graph(checkpoint, 64)
    part = rank_graph(graph, ranks, rank, steps_of(checkpoint, EngineConfig(), graph))
    name, size = f"{secrets.token_hex(8)}-0", ranks.tensor_parallel
    with ThreadPoolExecutor(size) as pool:
        groups = list(pool.map(lambda each: cpu.join_group(name, each, size, 1 << 20), range(size)))
    groups[ranks.part(rank)].compile(part, checkpoint.weights, LIMITS, num_threads=1).close()
    return part


def stored_data(checkpoint: Checkpoint, name: str) -> NDArray[Any]:
    weight = checkpoint.weights[name]
    assert isinstance(weight, DenseWeight)
    return weight.data


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_reads_its_layers(cold: Checkpoint, rank: int) -> None:
    """No more than 1.05 of its share of the file."""
    part = load(cold, Ranks(1, 2), rank)
    (path,) = cold.file.paths
    own = sum(cold.weights[name].nbytes for name in {parameter.name for parameter in part.parameters})
    assert own < 0.6 * path.stat().st_size
    assert 0.95 * own < cached_bytes(np.memmap(path, np.uint8, "r")) < 1.05 * own


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_the_pages_of_its_part(cold: Checkpoint, rank: int) -> None:
    """Half of the pages where the cut is by rows. All of them where it is by columns, and half a row is no page."""
    before = {name: cached_bytes(stored_data(cold, name)) for name in cold.weights}  # beside the header
    part = load(cold, Ranks(2, 1), rank)
    by_rows = by_columns = 0
    for parameter in part.parameters:
        stored = stored_data(cold, parameter.name)
        read = cached_bytes(stored) - before[parameter.name]
        if parameter.part is not None and parameter.part.dimension == 1:
            by_columns += 1
            assert read > 0.99 * stored.nbytes
        else:
            by_rows += parameter.part is not None
            assert read <= 1.05 * weight_of(cold.weights, parameter).nbytes + SLACK
    assert (by_rows, by_columns) == (2 * 8 + 2, 2 * 2)
