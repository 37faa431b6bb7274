"""A local Ray of two CPUs. Without ray installed (octavo[ray]) the tests here are skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tiny_gguf import tiny_gguf


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """Its address, for other processes."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer, eight tokens and a context of 256."""
    path = tmp_path_factory.mktemp("ray") / "tiny.gguf"
    path.write_bytes(tiny_gguf({"llama.context_length": 256}))
    return path
