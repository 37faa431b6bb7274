"""Loading on demand and unloading under a memory limit, with engines that are counted instead of started."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from octavo.config import EngineConfig, LoadProgress
from octavo.engine.client import EngineState
from octavo.engine.loading.model_memory import ModelMemory
from octavo.errors import InsufficientMemoryError, ModelLoadError, OverloadedError, UsageError
from octavo.server.errors import ApiError
from octavo.server.models.model_manager import LoadStatus, ModelManager
from octavo.server.models.served_adapters import ServedAdapter
from octavo.server.models.served_model import ServedModel
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import FakeClient, fake_model
from tests.support.seeing import SETTINGS
from tests.support.waiting import wait_until_async

SIZE = 100


class CountingLoader:
    """A `ModelLoader` that checks at every moment that no model is loaded twice and none is used after its end."""

    def __init__(self, tokenizer: Tokenizer, limit: int | None = None, delay_s: float = 0.0) -> None:
        self.tokenizer = tokenizer
        self.limit = limit
        self.delay_s = delay_s
        self.loaded: list[str] = []  # now
        self.num_loads = 0
        self.error: Exception | None = None

    async def estimate(
        self, _name: str, _config: EngineConfig, _held: ModelMemory, _progress: LoadProgress
    ) -> ModelMemory:
        await asyncio.sleep(0)
        return ModelMemory(SIZE)

    async def load(self, name: str, _config: EngineConfig, progress: LoadProgress) -> ServedModel:
        await asyncio.sleep(self.delay_s)  # timed: scripted by the test
        progress("packing", 1, 2)
        await asyncio.sleep(self.delay_s)  # timed: scripted by the test
        if self.error is not None:
            raise self.error
        assert name not in self.loaded
        self.loaded.append(name)
        self.num_loads += 1
        assert self.limit is None or len(self.loaded) * SIZE <= self.limit
        return fake_model(self.tokenizer, FakeClient(self.tokenizer), name=name)

    async def unload(self, model: ServedModel) -> None:
        await asyncio.sleep(self.delay_s)  # timed: scripted by the test
        await model.client.close()
        self.loaded.remove(model.name)


@pytest.fixture
def run(smollm2_tokenizer: Tokenizer) -> Callable[..., None]:
    """Runs a test's coroutine with a manager of models a to d and room for two, begun with a."""

    def run_it(test: Callable[[ModelManager, CountingLoader], Coroutine[Any, Any, None]], **options: Any) -> None:
        async def main() -> None:
            loader = CountingLoader(smollm2_tokenizer, 2 * SIZE, options.pop("delay_s", 0.0))
            configs = {name: EngineConfig(model=name) for name in "abcd"}
            manager = ModelManager(configs, loader, limit=ModelMemory(2 * SIZE), **options)
            await manager.load(None)
            try:
                await test(manager, loader)
            finally:
                await manager.close()
            assert loader.loaded == []

        asyncio.run(main())

    return run_it


def states(manager: ModelManager) -> str:
    return " ".join(f"{entry.name}:{entry.state}" for entry in manager.entries)


def test_the_longest_unused_model_makes_room(run: Callable[..., None]) -> None:
    async def test(manager: ModelManager, loader: CountingLoader) -> None:
        for name in "abac":  # b was used before a
            async with manager.use(name) as model:
                assert model.name == name
        assert sorted(loader.loaded) == ["a", "c"]
        assert states(manager) == "a:loaded b:unloaded c:loaded d:unloaded"
        assert loader.num_loads == 3
        assert manager.entry("b").info is not None  # what is known of it stays known

    run(test)


def test_a_model_may_see_until_it_is_known_that_none_does(run: Callable[..., None]) -> None:
    async def test(manager: ModelManager, _loader: CountingLoader) -> None:
        for name in "abcd":
            assert manager.may_see  # the next one was not loaded yet
            async with manager.use(name):
                pass
        assert not manager.may_see
        entry = manager.entry("b")
        assert entry.info is not None
        entry.info = dataclasses.replace(entry.info, images=SETTINGS)
        assert manager.may_see  # though it is not loaded

    run(test)


def test_the_progress_of_loading_is_told(run: Callable[..., None]) -> None:
    async def test(manager: ModelManager, loader: CountingLoader) -> None:
        entry = manager.entry("b")
        assert entry.loading is None
        loading = asyncio.create_task(manager.load("b"))
        seen = set()
        while not loading.done():
            await asyncio.sleep(0.001)  # timed: each state lasts longer
            seen.add(entry.loading)
        assert {LoadStatus("starting its engine"), LoadStatus("packing", 1, 2), None} <= seen
        assert entry.loading is None
        assert loader.num_loads == 2

    run(test, delay_s=0.02)


def test_one_of_several_models_must_be_named_and_an_unknown_one_is_404(run: Callable[..., None]) -> None:
    async def test(manager: ModelManager, _loader: CountingLoader) -> None:
        with pytest.raises(UsageError, match="a, b, c, d") as unnamed:
            async with manager.use(None):
                pass
        assert (unnamed.value.param, unnamed.value.code) == ("model", "missing_required_parameter")
        with pytest.raises(ApiError) as caught:
            async with manager.use("gpt-4"):
                pass
        assert (caught.value.status, caught.value.param, caught.value.code) == (404, "model", "model_not_found")

    run(test)


def test_concurrent_requests_wait_for_one_load(run: Callable[..., None]) -> None:
    async def test(manager: ModelManager, loader: CountingLoader) -> None:
        async def use() -> None:
            async with manager.use("b") as model:
                assert model.name == "b"

        await asyncio.gather(*(use() for _ in range(50)))
        assert loader.num_loads == 2

    run(test, delay_s=0.02)


def test_a_model_in_use_is_finished_first(run: Callable[..., None]) -> None:
    async def test(manager: ModelManager, loader: CountingLoader) -> None:
        async with manager.use("a") as a, manager.use("b"):
            waiting = asyncio.create_task(_name_of(manager, "c"))
            await wait_until_async(lambda: states(manager) == "a:unloading b:loaded c:loading d:unloaded")
            assert not a.client.is_closed  # type: ignore[attr-defined]
            again = asyncio.create_task(_name_of(manager, "a"))  # does not join the one that leaves
        assert await waiting == "c"
        assert await again == "a"
        assert loader.num_loads == 4

    run(test)


def test_a_long_answer_of_a_model_that_is_put_to_sleep_keeps_no_other_from_loading(run: Callable[..., None]) -> None:
    async def test(manager: ModelManager, loader: CountingLoader) -> None:
        async with manager.use("a") as a:
            sleeping = asyncio.create_task(manager.unload("a"))
            await wait_until_async(lambda: manager.entry("a").state == "unloading")
            again = asyncio.create_task(_name_of(manager, "a"))  # waits for the answer, and nobody waits for it
            assert await asyncio.wait_for(_name_of(manager, "b"), 2) == "b"
            await asyncio.wait_for(manager.unload("b"), 2)
            assert loader.loaded == ["a"]
            assert not sleeping.done()
            assert not again.done()
            assert not a.client.is_closed  # type: ignore[attr-defined]
        await sleeping
        assert await again == "a"
        assert loader.num_loads == 3

    run(test)


def test_a_sleeping_model_leaves_its_device_to_others_and_wakes_up(smollm2_tokenizer: Tokenizer) -> None:
    class OnDevice(CountingLoader):
        async def estimate(
            self, _name: str, _config: EngineConfig, _held: ModelMemory, _progress: LoadProgress
        ) -> ModelMemory:
            return ModelMemory(1, SIZE)

        async def load(self, name: str, config: EngineConfig, progress: LoadProgress) -> ServedModel:
            model = await super().load(name, config, progress)
            model.client.has_device = True  # type: ignore[attr-defined]
            return model

    async def main() -> None:
        loader = OnDevice(smollm2_tokenizer)
        configs = {name: EngineConfig(model=name) for name in "ab"}
        manager = ModelManager(configs, loader, limit=ModelMemory(10 * SIZE, SIZE))
        await manager.load("a")
        async with manager.use("a") as a:
            sleeping = asyncio.create_task(manager.sleep("a"))
            for _ in range(10):
                await asyncio.sleep(0)
            assert not a.client.is_asleep  # type: ignore[attr-defined]
        await sleeping
        assert states(manager) == "a:sleeping b:unloaded"
        await manager.load("b")  # has the device, and a stays in main memory
        assert states(manager) == "a:sleeping b:loaded"
        async with manager.use("a") as again:  # b makes room
            assert again is a
            assert not a.client.is_asleep  # type: ignore[attr-defined]
        assert states(manager) == "a:loaded b:unloaded"
        assert loader.num_loads == 2
        await asyncio.gather(manager.sleep("a"), *(_name_of(manager, "a") for _ in range(5)))
        assert loader.num_loads == 2
        await manager.close()

    asyncio.run(main())


async def _name_of(manager: ModelManager, name: str) -> str:
    async with manager.use(name) as model:
        await asyncio.sleep(0)
        return model.name


@pytest.mark.parametrize("seed", range(3))
def test_many_switches_under_load(run: Callable[..., None], seed: int) -> None:
    """The loader itself checks that the limit holds and that no model is there twice."""

    async def test(manager: ModelManager, loader: CountingLoader) -> None:
        rng = random.Random(seed)

        async def user(name: str, start_s: float, hold_s: float, patience_s: float | None) -> bool:
            async def use() -> None:
                async with manager.use(name) as model:
                    await asyncio.sleep(hold_s)  # timed: random use
                    assert model.name == name
                    assert not model.client.is_closed  # type: ignore[attr-defined]

            await asyncio.sleep(start_s)  # timed: random arrivals
            try:
                await asyncio.wait_for(use(), patience_s)
            except asyncio.TimeoutError:
                return False
            return True

        users = [
            user(rng.choice("abcd"), rng.random() * 0.5, rng.random() * 0.01, rng.choice([None, None, 0.01]))
            for _ in range(400)
        ]
        answers = await asyncio.gather(*users)
        assert sum(answers) > 200
        assert len(loader.loaded) <= 2
        assert not any(entry.residency.num_users for entry in manager.entries if entry.residency is not None)

    run(test, delay_s=0.001, max_waiting=1000)


def test_closing_waits_for_a_model_that_is_being_unloaded(run: Callable[..., None]) -> None:
    """`run` itself checks that none is left."""

    async def test(manager: ModelManager, loader: CountingLoader) -> None:
        await manager.load("b")
        loader.delay_s = 0.05
        waiting = asyncio.create_task(_name_of(manager, "c"))
        await wait_until_async(lambda: "unloading" in states(manager))
        assert "c" not in loader.loaded  # its room is not free yet
        await manager.close()
        with pytest.raises(OverloadedError, match="shutting down"):
            await waiting

    run(test)


def test_a_broken_model_says_why_and_keeps_nobody_waiting(run: Callable[..., None]) -> None:
    async def test(manager: ModelManager, loader: CountingLoader) -> None:
        loader.error = ModelLoadError("b.gguf: offset 12: broken")
        results = await asyncio.gather(*(_name_of(manager, "b") for _ in range(5)), return_exceptions=True)
        assert [str(result) for result in results] == ["b.gguf: offset 12: broken"] * 5
        with pytest.raises(ModelLoadError):
            await _name_of(manager, "b")
        assert str(manager.entry("b").last_error) == "b.gguf: offset 12: broken"
        loader.error = None
        await manager.load("b")  # asked for by name, it is tried again
        assert await _name_of(manager, "b") == "b"

    run(test)


def test_a_model_larger_than_the_limit_is_refused_with_the_numbers(run: Callable[..., None]) -> None:
    async def test(manager: ModelManager, loader: CountingLoader) -> None:
        manager._limit = ModelMemory(SIZE - 1)
        with pytest.raises(InsufficientMemoryError, match="models_memory"):
            await manager.load("b")
        assert loader.loaded == ["a"]

    run(test)


def test_waiting_for_a_load_has_limits(run: Callable[..., None]) -> None:
    async def test(manager: ModelManager, loader: CountingLoader) -> None:
        loader.delay_s = 0.3
        waiting = [asyncio.create_task(_name_of(manager, "b")) for _ in range(2)]
        await wait_until_async(lambda: manager.entry("b").state == "loading")
        with pytest.raises(OverloadedError, match="waiting for b") as caught:
            await _name_of(manager, "b")
        assert caught.value.code == "model_loading"
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [getattr(result, "code", None) for result in results] == ["model_loading"] * 2

    run(test, wait_s=0.1, max_waiting=2)


def test_requests_before_the_first_model_is_there(smollm2_tokenizer: Tokenizer) -> None:
    async def main() -> None:
        loader = CountingLoader(smollm2_tokenizer, delay_s=0.1)
        manager = ModelManager({"a": EngineConfig(model="a")}, loader)
        loading = asyncio.create_task(manager.load(None))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError) as caught:
            await _name_of(manager, None)  # type: ignore[arg-type]
        assert caught.value.code == "model_loading"
        assert manager.entry(None).state == "loading"
        await loading
        assert await _name_of(manager, "a") == "a"
        await manager.close()

    asyncio.run(main())


def test_unloading_by_hand_and_an_engine_that_died(run: Callable[..., None]) -> None:
    async def test(manager: ModelManager, loader: CountingLoader) -> None:
        await manager.unload("a")
        assert loader.loaded == []
        assert manager.entry("a").state == "unloaded"
        await manager.unload("a")  # nothing to do
        async with manager.use("a") as model:
            model.client.state = EngineState.DEAD  # type: ignore[attr-defined]
        async with manager.use("a") as other:
            assert other is not model
        assert loader.num_loads == 3

    run(test)


def test_an_adapter_that_cannot_be_read(
    run: Callable[..., None], smollm2_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the start of a server, whose engine ends too, but keeps no model from being loaded later."""

    async def refuse(*_: object) -> None:
        raise ModelLoadError("gone: no such file or directory")

    monkeypatch.setattr(FakeClient, "add_adapter", refuse, raising=False)
    adapter = ServedAdapter("sql", Path("gone"), "a", 0, "gone")

    async def test(manager: ModelManager, loader: CountingLoader) -> None:
        manager.adapters.put(adapter)
        await manager.unload("a")
        await manager.load("a")
        assert (manager.entry("a").state, loader.loaded) == ("loaded", ["a"])

    async def start() -> None:
        loader = CountingLoader(smollm2_tokenizer)
        manager = ModelManager({"a": EngineConfig(model="a")}, loader)
        manager.adapters.put(adapter)
        with pytest.raises(ModelLoadError, match="gone: no such file"):
            await manager.load(None)
        assert loader.loaded == ["a"]
        await manager.close()
        assert loader.loaded == []

    run(test)
    asyncio.run(start())


def test_close_while_a_model_is_loaded(run: Callable[..., None]) -> None:
    async def test(manager: ModelManager, loader: CountingLoader) -> None:
        loader.delay_s = 5.0
        waiting = asyncio.create_task(_name_of(manager, "b"))
        await wait_until_async(lambda: manager.entry("b").state == "loading")
        loader.delay_s = 0.0
        await manager.close()
        with pytest.raises(OverloadedError) as caught:
            await waiting
        assert caught.value.code == "server_shutting_down"

    run(test)
