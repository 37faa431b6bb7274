"""`LLM` and `AsyncLLM` with the fake executor, without a model file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from octavo.config import EngineConfig, LoadProgress
from octavo.engine.load import LoadedModel
from tests.support.fake_executor import FakeExecutor, fake_engine


def use_fake_model(monkeypatch: pytest.MonkeyPatch, **options: Any) -> FakeExecutor:
    """Make every model the fake one from now on, and return its executor.

    options: arguments of `fake_engine`.
    """
    engine = fake_engine(**options)
    executor = cast(FakeExecutor, engine.executor)

    def load(config: EngineConfig, progress: LoadProgress | None = None, **_options: bool) -> LoadedModel:
        if progress is not None:
            progress("packing", 1, 1)
        return LoadedModel(engine, executor, config.model, "fake", 1, Path("fake.gguf"), hidden_size=8)

    monkeypatch.setattr("octavo.engine.session.load_engine", load)
    return executor
