"""Models as Ollama's own client sees them: their properties, blobs, loading, and when they leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import Script
from tests.support.scripted_server import scripted_server
from tests.support.server import RunningServer
from tests.support.waiting import wait_until

MODEL = "smollm2"
QUESTION: list[Any] = [{"role": "user", "content": "What is 2 + 2?"}]


@pytest.fixture(scope="module")
def client(server: RunningServer) -> ollama.Client:
    return ollama.Client(host=server.url, timeout=60)


def test_the_models(client: ollama.Client, server: RunningServer) -> None:
    (model,) = client.list().models
    assert model.model == MODEL
    assert model.size is not None
    assert model.size > 90_000_000
    assert model.details is not None
    assert (model.details.format, model.details.family) == ("gguf", "llama")
    assert (model.details.parameter_size, model.details.quantization_level) == ("134.52M", "Q4_1")
    assert model.modified_at is not None
    shown = client.show(MODEL)
    assert shown.modelinfo is not None
    assert shown.modelinfo["general.architecture"] == "llama"
    assert shown.modelinfo["llama.context_length"] == 8192
    assert shown.modelinfo["general.parameter_count"] == 134_515_008
    assert shown.capabilities == ["completion", "tools"]
    assert "temperature" in (shown.parameters or "")
    assert "im_start" in (shown.template or "")
    (running,) = client.ps().models
    assert running.model == MODEL
    assert running.context_length == 8192
    assert running.size_vram == 0
    assert running.expires_at is not None
    assert running.expires_at.year > 2200
    assert client.show(f"{MODEL}:latest").details == shown.details
    assert server.client.get("/api/version").json()["version"].count(".") == 2


def test_requests_without_a_prompt_load_and_unload(smollm2_tokenizer: Tokenizer) -> None:
    with scripted_server(smollm2_tokenizer, "ollama") as running:
        client = ollama.Client(host=running.url)
        assert client.generate("fake").done_reason == "load"
        assert client.chat("fake").done_reason == "load"
        assert [part.done_reason for part in client.generate("fake", stream=True)] == ["load"]
        assert len(client.ps().models) == 1
        assert client.generate("fake", keep_alive=0).done_reason == "unload"
        assert wait_for_unload(client)


def test_a_model_leaves_after_its_last_answer(smollm2_tokenizer: Tokenizer) -> None:
    for stream in (False, True):
        with scripted_server(smollm2_tokenizer, "ollama") as running:
            client = ollama.Client(host=running.url)
            running.script = Script(["Hello", " world"])
            answer: Any = client.chat("fake", QUESTION, keep_alive="0s", stream=stream)
            text = "".join(part.message.content for part in answer) if stream else answer.message.content
            assert text == "Hello world"
            assert wait_for_unload(client)


def wait_for_unload(client: ollama.Client) -> bool:
    return wait_until(lambda: not client.ps().models)


def test_blobs(server: RunningServer, tmp_path: Path) -> None:
    """The files of the served models are known; a new file is refused before its bytes are sent."""
    with httpx.Client(base_url=server.url, timeout=20) as http:
        digest = http.get("/api/tags").json()["models"][0]["digest"]
        known, unknown = f"/api/blobs/sha256:{digest}", f"/api/blobs/sha256:{digest[::-1]}"
        assert (http.head(known).status_code, http.head(unknown).status_code) == (200, 404)
        assert http.post(known, content=b"GGUF" * 9).status_code == 200
        assert "sha256" in http.get("/api/blobs/sha256:1").json()["error"]
        assert http.head("/api/blobs/sha256:1").status_code == 400
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(9 << 20))  # more than any body may have
    with pytest.raises(ollama.ResponseError, match="octavo serve NAME=FILE") as refused:
        ollama.Client(host=server.url).create_blob(path)
    assert refused.value.status_code == 400


def test_pull_of_a_model_that_is_there(client: ollama.Client) -> None:
    assert client.pull(MODEL).status == "success"
    assert [part.status for part in client.pull(MODEL, stream=True)][-1] == "success"
