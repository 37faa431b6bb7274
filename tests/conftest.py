"""Models that several tests share."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from octavo.loader.hub import resolve_model

LARGE_MODELS = Path.home() / ".cache" / "octavo-models"


def pytest_configure() -> None:
    """A job in the background of a script inherits an ignored SIGINT, and hands it on to every program it starts.

    SIGTERM, with which a run is ended that takes too long, has to leave no server behind either.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model, SmolLM2-135M-Instruct Q4_1 (98 MB), downloaded as `octavo` does it."""
    return resolve_model("smollm2")


@pytest.fixture(scope="session")
def qwen_0_5b_path() -> Path:
    """Qwen2.5-Coder-0.5B-Instruct Q4_K_M (491 MB); for tests marked slow."""
    return _large_model("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf")


@pytest.fixture(scope="session")
def qwen_1_5b_path() -> Path:
    """Qwen2.5-Coder-1.5B-Instruct Q4_K_M (1.1 GB); for tests marked slow."""
    return _large_model("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf")


def _large_model(filename: str) -> Path:
    path = LARGE_MODELS / filename
    if not path.exists():
        pytest.skip(f"{path} is not here; CONTRIBUTING.md says how to get it")
    return path
