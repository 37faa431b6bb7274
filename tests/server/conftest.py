"""The server that tests of `octavo.server` share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import certifi
import pytest

from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import read_tokenizer
from tests.support.server import RunningServer, running_server


@pytest.fixture(scope="session", autouse=True)
def one_authority(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every client of httpx, the official ones too, reads all authorities it trusts: 25 ms, for servers without TLS.

    smollm2_path: must be here, as its download wants them all.
    """
    assert smollm2_path.exists()
    end = "-----END CERTIFICATE-----\n"
    first, _, _ = Path(certifi.where()).read_text(encoding="utf-8").partition(end)
    path = tmp_path_factory.mktemp("authorities") / "one.pem"
    path.write_text(first + end, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(path))
        yield


@pytest.fixture(scope="session")
def server(smollm2_path: Path) -> Iterator[RunningServer]:
    """`octavo serve` with SmolLM2 in a process of its own, for all tests that leave it as it was."""
    with running_server(f"smollm2={smollm2_path}", "--kv-cache-memory", "1GiB") as running:
        yield running


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_path: Path) -> Tokenizer:
    """The vocabulary and chat template of SmolLM2, for servers whose engine is a fake one."""
    return read_tokenizer(smollm2_path)
