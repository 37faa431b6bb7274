"""A tiny model in a file, and a temporary directory that processes must leave empty."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.config import EngineConfig
from tests.support.tiny_gguf import tiny_gguf


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """A model of one layer and eight tokens with a long context: answers and prompts that last as long as needed."""
    path = tmp_path_factory.mktemp("core") / "tiny.gguf"
    path.write_bytes(tiny_gguf({"llama.context_length": 1 << 17}))
    return EngineConfig(model=str(path), kv_cache_memory="256MiB", num_threads=1)


@pytest.fixture(autouse=True)
def temporary_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory in which engine processes create theirs; it must be empty after each test."""
    with tempfile.TemporaryDirectory(prefix="core-") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)
        monkeypatch.undo()
        assert list(Path(directory).iterdir()) == []
