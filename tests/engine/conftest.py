"""The tests of the engine that compute with a hash of the tokens also run on the torch executor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import fake_executor
from tests.support.torch_model import TorchModel

_ON_TORCH = (
    "engine_thread", "batch_builder", "beam_search", "constrained", "drafts", "engine", "metrics", "overlap",
    "request_checks", "scheduler", "step_budget",
)  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs each test of these files twice, but for those that choose backends themselves."""
    name = metafunc.module.__name__.rpartition(".test_")[2]
    if name in _ON_TORCH and "backend" not in metafunc.fixturenames:
        metafunc.parametrize("computed_by", ["hash", "torch"], indirect=True, scope="module")


@pytest.fixture(scope="module", autouse=True)
def computed_by(request: pytest.FixtureRequest) -> Iterator[None]:
    """Gives `FakeExecutor` a real model for the second run of a file's tests."""
    if getattr(request, "param", "hash") == "torch":
        fake_executor.real_model = TorchModel()
    yield
    fake_executor.real_model = None
