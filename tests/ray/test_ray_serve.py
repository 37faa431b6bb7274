"""The server as an application of Ray Serve."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from octavo.config import EngineConfig
from octavo.errors import UsageError
from octavo.ray.serve import _with_threads, openai_app
from octavo.server.config import ServerConfig


def test_an_open_address_wants_a_key() -> None:
    with pytest.raises(UsageError, match="allow"):
        openai_app("smollm2", server=ServerConfig(host="0.0.0.0"))


def test_replicas_do_not_sleep() -> None:
    with pytest.raises(UsageError, match="sleep_after is 60; Ray Serve"):
        openai_app("smollm2", server=ServerConfig(sleep_after=60))


def test_the_processes_of_a_replica_share_its_cpus() -> None:
    config = EngineConfig(tensor_parallel_size=2, data_parallel_size=2)
    assert _with_threads(config, 9).num_threads == 2
    assert _with_threads(EngineConfig(num_threads=3), 4).num_threads == 3
    with pytest.raises(UsageError, match="num_cpus is 3, and each replica has 4 processes"):
        openai_app("smollm2", num_cpus=3, tensor_parallel_size=2, data_parallel_size=2)
    with pytest.raises(UsageError, match="2 processes of 2 or more"):
        openai_app("smollm2", num_cpus=3, tensor_parallel_size=2, num_threads=2)


@pytest.mark.usefixtures("cluster")
def test_it_answers_like_the_server(smollm2_path: Path) -> None:
    from ray import serve

    serve.start(http_options={"host": "127.0.0.1", "port": 8123})
    try:
        app = openai_app(str(smollm2_path), num_cpus=1, kv_cache_memory="32MiB", max_model_len=512)
        serve.run(app, name="octavo", route_prefix="/")
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "temperature": 0}
        with httpx.Client(base_url="http://127.0.0.1:8123", timeout=120) as client:
            assert client.get("/health").json() == {"status": "ready"}
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200
            text = answer.json()["choices"][0]["message"]["content"]
            with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
                lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
            assert lines[-1] == "[DONE]"
            deltas = [json.loads(line)["choices"] for line in lines[:-1]]
            assert "".join(choice[0]["delta"].get("content") or "" for choice in deltas if choice) == text
            refused = client.post("/v1/chat/completions", json={**body, "max_tokens": 0})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "max_tokens"
    finally:
        serve.shutdown()
