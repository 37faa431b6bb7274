"""Models that several tests share."""

from __future__ import annotations

import gc
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from octavo.loader.hub import resolve_model

LARGE_MODELS = Path.home() / ".cache" / "octavo-models"


def pytest_configure(config: pytest.Config) -> None:
    """Examples are always the same, so that a change fails what it broke; with `-m slow` they are new in each run.

    No example has a time limit, which a busy machine would exceed.

    A job in the background of a script inherits an ignored SIGINT, one under `nohup` an ignored SIGHUP, and hands it on
    to every program it starts.

    SIGTERM, which ends a run that takes too long, must not leave a server behind either.
    """
    settings.register_profile(
        "octavo",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize=config.option.markexpr == "not slow",
        database=None,
    )
    settings.load_profile("octavo")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Exempts the imported modules from garbage collection, since they stay to the end.

    The judges compute tiny models in one thread: on a busy machine two wait for each other longer than they compute.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


@pytest.fixture
def keeps_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of new files are kept, and loaded in any case: tiny models often compute sooner than that."""
    monkeypatch.setattr("octavo.loader.mapped_file._RACY_NS", 0)
    monkeypatch.setattr("octavo.engine.kv.load_rates.LoadRates.is_worth", lambda *_: True)
    monkeypatch.setattr("octavo.engine.kv.load_rates.LoadRates.patience_s", lambda *_: 60.0)


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
