"""The server that several of these clients ask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.scripted_server import ScriptedServer, scripted_server


@pytest.fixture(scope="module")
def fake(smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    """Chat completions and responses of scripted turns, in a context that has room for the clients' own prompts."""
    with scripted_server(smollm2_tokenizer, "openai", "responses", max_model_len=8192) as running:
        yield running
