"""Tiny models with a vocabulary of eight tokens, and texts of their letters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.gguf_writer import Tensor
from tests.support.tiny_gguf import plain_tensors, tiny_gguf

TEXT = "".join("abcd"[i] for i in np.random.default_rng(3).integers(0, 4, 200))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In float32, so that it computes as its reference does."""
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    path.write_bytes(tiny_gguf(tensors=plain_tensors()))
    return path


@pytest.fixture(scope="session")
def other(tiny: Path) -> Path:
    path = tiny.with_name("other.gguf")
    path.write_bytes(tiny_gguf(tensors=plain_tensors(1)))
    return path


def spoilt(tiny: Path, name: str, value: float) -> Path:
    """The tiny model, with this number all over one tensor."""
    path = tiny.with_name(f"{name}-{value}.gguf")
    tensors = [
        Tensor(t.name, t.type_name, t.shape, np.full(t.shape, value, np.float32).tobytes()) if t.name == name else t
        for t in plain_tensors()
    ]
    path.write_bytes(tiny_gguf(tensors=tensors))
    return path


@pytest.fixture(scope="session")
def damaged(tiny: Path) -> Path:
    """Its weights are numbers, its logits NaN: the sums overflow."""
    return spoilt(tiny, "output_norm.weight", 3e38)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path
