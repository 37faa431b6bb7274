"""Sleeping servers: when they begin to, who wakes them, and that nothing changes in between."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.errors import UsageError
from octavo.server.config import ServerConfig
from octavo.server.models.model_manager import ModelManager
from octavo.server.models.served_model import ServedModel
from octavo.server.models.sleeper import Sleeper
from octavo.tokenizer.tokenizer import Tokenizer
from tests.adapters.test_engine import save_adapter
from tests.server.test_model_manager import CountingLoader
from tests.support.server import running_server
from tests.support.text_models import save_decoder
from tests.support.tiny_gguf import tiny_gguf, tiny_tensors
from tests.support.waiting import wait_until, wait_until_async

BODY: dict[str, Any] = {
    "prompt": "ab",
    "max_tokens": 12,
    "ignore_eos": True,
    "temperature": 1,
    "seed": 3,
    "logprobs": 2,
}


def test_a_server_sleeps_and_a_request_wakes_it(tmp_path: Path) -> None:
    """By hand and after the time; the answer and its probabilities are equal to the last bit."""
    model = tmp_path / "a.gguf"
    model.write_bytes(tiny_gguf(tensors=tiny_tensors(0)))

    def engines() -> list[int]:
        return [child.pid for child in server.children() if "octavo.core.main" in " ".join(child.cmdline())]

    with running_server(f"a={model}", "--max-num-seqs", "4", "--sleep-after", "1s") as server, server.client as client:
        first = client.post("/v1/completions", json=BODY).json()["choices"]
        wait_until(lambda: client.get("/is_sleeping").json() == {"is_sleeping": True})
        wait_until(lambda: not engines())  # so its memory is really free
        assert client.get("/health/ready").status_code == 200
        assert client.get("/v1/models").json()["data"][0]["state"] == "unloaded"
        awake = client.get("/props").json()
        assert client.post("/v1/completions", json=BODY).json()["choices"] == first
        assert client.post("/sleep?level=1").json() == {"is_sleeping": True}
        assert not engines()
        asleep = client.get("/props").json()  # which wakes nobody
        assert (awake.pop("is_sleeping"), asleep.pop("is_sleeping")) == (True, True)
        assert awake == asleep
        assert awake["default_generation_settings"]["n_ctx"] == 64
        assert not any(slot["is_processing"] for slot in client.get("/slots").json())
        assert client.get("/is_sleeping").json() == {"is_sleeping": True}
        assert not engines()
        assert client.post("/wake_up").json() == {"is_sleeping": False}
        assert client.get("/props").json() == {**asleep, "is_sleeping": False}
        assert client.post("/v1/completions", json=BODY).json()["choices"] == first
        wrong = client.post("/sleep?level=3")
        assert wrong.status_code in (400, 422)
        assert "level" in wrong.text


def test_adapters_are_read_again_after_a_sleep(tmp_path: Path) -> None:
    """Those of the start, and those that were loaded since."""
    model = save_decoder(tmp_path / "model")
    paths = [str(save_adapter(model, tmp_path / name, seed)) for seed, name in enumerate(("sql", "poem"))]
    options = ("--max-num-seqs", "4", "--lora-modules", f"sql={paths[0]}", "--allow-runtime-lora")
    with running_server(f"a={model}", *options) as server, server.client as client:
        load = {"lora_name": "poem", "lora_path": paths[1]}
        assert client.post("/v1/load_lora_adapter", json=load).status_code == 200

        def answers() -> list[Any]:
            found = (client.post("/v1/completions", json={**BODY, "model": name}) for name in ("a", "sql", "poem"))
            return [answer.json()["choices"] for answer in found]

        before = answers()
        assert before[0] != before[1] != before[2] != before[0]
        assert client.post("/sleep?level=1").json() == {"is_sleeping": True}
        assert answers() == before


def test_a_model_on_a_device_keeps_its_weights_in_main_memory(tmp_path: Path) -> None:
    """Level 1: the engine's process lives on; answers are equal to the last bit. Level 2 then ends it."""
    model = tmp_path / "a.gguf"
    model.write_bytes(tiny_gguf(tensors=tiny_tensors(0)))

    def engines() -> list[int]:
        return [child.pid for child in server.children() if "octavo.core.main" in " ".join(child.cmdline())]

    options = ("--max-num-seqs", "4", "--backend", "torch:cpu", "--max-model-len", "64")
    with running_server(f"a={model}", *options) as server, server.client as client:
        first = client.post("/v1/completions", json=BODY).json()["choices"]
        before = engines()
        assert client.post("/sleep").json() == {"is_sleeping": True}
        assert client.post("/sleep?level=1").json() == {"is_sleeping": True}
        assert client.get("/v1/models").json()["data"][0]["state"] == "sleeping"
        assert client.get("/props").json()["is_sleeping"]
        assert client.get("/is_sleeping").json() == {"is_sleeping": True}
        assert client.get("/health/ready").status_code == 200
        assert engines() == before
        assert client.post("/v1/completions", json=BODY).json()["choices"] == first
        assert client.get("/is_sleeping").json() == {"is_sleeping": False}
        assert client.post("/sleep?level=1").json() == {"is_sleeping": True}
        assert client.post("/wake_up").json() == {"is_sleeping": False}
        assert client.post("/v1/completions", json=BODY).json()["choices"] == first
        assert engines() == before
        assert client.post("/sleep?level=1").json() == {"is_sleeping": True}
        assert client.post("/sleep?level=2").json() == {"is_sleeping": True}
        wait_until(lambda: not engines())
        assert client.post("/v1/completions", json=BODY).json()["choices"] == first


def test_only_idle_time_counts(smollm2_tokenizer: Tokenizer) -> None:
    async def run() -> None:
        loader = CountingLoader(smollm2_tokenizer)
        manager = ModelManager({name: EngineConfig(model=name) for name in "ab"}, loader)
        sleeper = Sleeper(manager, 0.05)
        assert not sleeper.is_sleeping  # it has not begun
        await manager.load(None)
        for _ in range(4):
            await asyncio.sleep(0.03)  # timed: use that would let it sleep if it counted as idle
            sleeper.watch(1)  # a request runs
        for _ in range(4):
            async with manager.use("b"):
                await asyncio.sleep(0.03)  # timed: use that would let it sleep if it counted as idle
            sleeper.watch(0)
        async with manager.use("b"):
            for _ in range(4):
                await asyncio.sleep(0.03)  # timed: use that would let it sleep if it counted as idle
                sleeper.watch(0)
        assert sorted(loader.loaded) == ["a", "b"]

        def falls_asleep() -> bool:
            sleeper.watch(0)
            return sleeper.is_sleeping

        await wait_until_async(falls_asleep)
        assert loader.loaded == []
        await sleeper.sleep(2)  # has nothing to do
        await sleeper.wake_up()
        assert loader.loaded == ["a"]
        assert not sleeper.is_sleeping
        await sleeper.close()
        await manager.close()

    asyncio.run(run())


def test_a_sleep_that_fails_is_reported(smollm2_tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(CountingLoader):
        async def unload(self, model: ServedModel) -> None:
            await super().unload(model)
            raise OSError("the process does not end")

    async def run() -> None:
        manager = ModelManager({"a": EngineConfig(model="a")}, Failing(smollm2_tokenizer))
        sleeper = Sleeper(manager, 0.01)
        await manager.load(None)

        def is_reported() -> bool:
            sleeper.watch(0)
            return "could not be put to sleep" in caplog.text

        await wait_until_async(is_reported)
        await sleeper.close()
        await manager.close()

    asyncio.run(run())
    assert "the models could not be put to sleep: the process does not end" in caplog.text


def test_it_never_sleeps_by_default(smollm2_tokenizer: Tokenizer) -> None:
    async def run() -> None:
        loader = CountingLoader(smollm2_tokenizer)
        manager = ModelManager({"a": EngineConfig(model="a")}, loader)
        await manager.load(None)
        sleeper = Sleeper(manager, ServerConfig().sleep_after or None)
        for _ in range(100):
            sleeper.watch(0)
            await asyncio.sleep(0)
        assert loader.loaded == ["a"]
        await manager.close()

    asyncio.run(run())


@pytest.mark.parametrize("value", [-1.0, float("nan"), 1e9])
def test_wrong_times(value: float) -> None:
    with pytest.raises(UsageError, match="sleep_after"):
        ServerConfig(sleep_after=value)
