"""Several models in one server, with engines in processes of their own that come and go."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.server import RunningServer, running_server
from tests.support.tiny_gguf import tiny_gguf, tiny_tensors
from tests.support.waiting import wait_until

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def two_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Models a and b, of which only one fits into the memory at a time."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("ab"):
        (folder / f"{name}.gguf").write_bytes(tiny_gguf(tensors=tiny_tensors(seed)))
    models = [f"{name}={folder / name}.gguf" for name in "ab"]
    with running_server(*models, "--models-memory", "200MiB", "--max-num-seqs", "8") as server:
        yield server


def body(model: str | None, max_tokens: int = 4) -> dict[str, Any]:
    fields = {"prompt": "ab", "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    return fields if model is None else {**fields, "model": model}


def states(client: httpx.Client) -> dict[str, str]:
    return {card["id"]: card["state"] for card in client.get("/v1/models").json()["data"]}


def test_one_makes_room_for_the_other(two_models: RunningServer) -> None:
    with two_models.client as client:
        unnamed = client.post(COMPLETIONS, json=body(None))
        assert (unnamed.status_code, unnamed.json()["error"]["code"]) == (400, "missing_required_parameter")
        assert unnamed.json()["error"]["param"] == "model"
        assert unnamed.json()["error"]["type"] == "invalid_request_error"
        first = client.post(COMPLETIONS, json=body("a")).json()
        assert first["model"] == "a"
        assert states(client) == {"a": "loaded", "b": "unloaded"}
        [engine_a] = [child for child in two_models.children() if "octavo.core.main" in " ".join(child.cmdline())]
        second = client.post(COMPLETIONS, json=body("b")).json()
        assert second["model"] == "b"
        assert second["choices"][0]["text"] != first["choices"][0]["text"]
        assert states(client) == {"a": "unloaded", "b": "loaded"}
        psutil.wait_procs([engine_a], timeout=15)
        assert not engine_a.is_running()  # so its memory is really free
        assert client.get("/health/ready").status_code == 200  # a would be loaded again
        again = client.post(COMPLETIONS, json=body("a")).json()
        assert again["choices"][0]["text"] == first["choices"][0]["text"]


def test_loading_and_unloading_by_hand(two_models: RunningServer) -> None:
    with two_models.client as client:
        card = client.post("/v1/models/b/load").json()
        assert (card["id"], card["state"], card["max_model_len"]) == ("b", "loaded", 64)
        assert card["memory"]["weight_bytes"] > 0
        assert client.post("/v1/models/b/unload").json()["state"] == "unloaded"
        assert set(states(client).values()) == {"unloaded"}
        assert client.get("/v1/models/b").json()["max_model_len"] == 64  # still known
        assert client.get("/health/live").status_code == 200
        for path in ("/v1/models/c", "/v1/models/c/d"):
            missing = client.get(path)
            assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        assert client.post("/v1/models/c/load").status_code == 404
        missing = client.post(COMPLETIONS, json=body("c"))
        assert (missing.status_code, missing.json()["error"]["param"]) == (404, "model")


def test_the_server_forgets_the_tokenizer_of_an_unloaded_model(smollm2_path: Path) -> None:
    """Each has 14 MiB. The allocator keeps about one of them for the next."""
    with running_server(str(smollm2_path), "--kv-cache-memory", "16MiB") as server, server.client as client:
        process, name = psutil.Process(server.process.pid), client.get("/v1/models").json()["data"][0]["id"]
        before = process.memory_info().rss
        for action in ["unload", "load"] * 4:
            assert client.post(f"/v1/models/{name}/{action}").status_code == 200
        assert process.memory_info().rss - before < 22 << 20


def test_many_users_of_both_at_once(two_models: RunningServer) -> None:
    """Everybody is answered by the model that was asked for; the answers do not change."""

    async def test() -> None:
        rng = random.Random(0)
        texts: dict[str, set[str]] = {"a": set(), "b": set()}
        async with httpx.AsyncClient(base_url=two_models.url, timeout=60) as client:

            async def ask(name: str, delay_s: float) -> None:
                await asyncio.sleep(delay_s)  # timed: random arrivals
                answer = await client.post(COMPLETIONS, json=body(name, 8))
                assert answer.status_code == 200, answer.text
                assert answer.json()["model"] == name
                texts[name].add(answer.json()["choices"][0]["text"])

            await asyncio.gather(*(ask(rng.choice("ab"), rng.random()) for _ in range(60)))
        assert {name: len(found) for name, found in texts.items()} == {"a": 1, "b": 1}

    asyncio.run(test())

    def engines() -> list[str]:
        lines = (" ".join(child.cmdline()) for child in two_models.children())
        return [line for line in lines if "octavo.core.main" in line]

    wait_until(lambda: len(engines()) == 1, engines, seconds=30)


def test_a_model_that_breaks_does_not_harm_the_other(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.gguf", tmp_path / "bad.gguf"
    good.write_bytes(tiny_gguf())
    bad.write_bytes(b"GGUF" + b"\xff" * 64)
    with running_server(f"good={good}", f"bad={bad}") as server, server.client as client:
        refused = client.post(COMPLETIONS, json=body("bad"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_loading")
        assert str(tmp_path) not in refused.text  # that is for the log
        assert "bad.gguf" in server.wait_for_line("cannot be loaded")
        assert client.post(COMPLETIONS, json=body("good")).status_code == 200
        assert client.get("/health/ready").status_code == 200
