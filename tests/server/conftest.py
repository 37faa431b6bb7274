"""The server that tests of `octavo.server` share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import read_tokenizer
from tests.support.server import RunningServer, running_server


@pytest.fixture(scope="session")
def server(smollm2_path: Path) -> Iterator[RunningServer]:
    """`octavo serve` with SmolLM2 in a process of its own, for all tests that leave it as it was."""
    with running_server(f"smollm2={smollm2_path}", "--kv-cache-memory", "1GiB") as running:
        yield running


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_path: Path) -> Tokenizer:
    """The vocabulary and chat template of SmolLM2, for servers whose engine is a fake one."""
    return read_tokenizer(smollm2_path)
