"""The memory that a model will take, and the steps of loading it before it is ready."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from octavo.backends import get_backend
from octavo.backends.memory import MemoryBudget, Sizes
from octavo.backends.split_sizes import SplitSizes
from octavo.config import EngineConfig, LoadProgress
from octavo.engine.loading.model_graph import model_sizes
from octavo.engine.loading.model_memory import PROCESS_BYTES, MemoryShares, ModelMemory, machine_memory
from octavo.errors import EngineDeadError, InsufficientMemoryError, UsageError
from octavo.generation_request import GenerationRequest
from octavo.loader.checkpoint import open_checkpoint
from octavo.prompt import Prompt
from octavo.sampling_params import SamplingParams
from octavo.server.config import ServerConfig
from octavo.server.models.model_loader import ModelLoader, NoReport, warm_up
from octavo.server.models.model_manager import ModelManager
from octavo.server.models.served_model import ServedModel
from octavo.server.observability.metrics import ServerMetrics
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import FakeClient, Script, fake_model
from tests.support.small_device import SmallDevice
from tests.support.tiny_gguf import tiny_gguf, wide_gguf
from tests.support.waiting import wait_until_async

MIB = 1 << 20


def loader(memory_bytes: int, machine_bytes: int) -> ModelLoader:
    config = ServerConfig(in_process=True)
    shares = MemoryShares.of(ModelMemory(machine_bytes), memory_bytes, 2)
    return ModelLoader(config, ServerMetrics("vllm"), NoReport(), shares)


def test_a_model_larger_than_memory_takes_all_of_it(smollm2_path: Path) -> None:
    """It runs from disk. A limit below the machine's memory is kept: there the model does not fit."""
    config = EngineConfig(model=str(smollm2_path), max_model_len=256, max_num_seqs=2, max_num_batched_tokens=64)
    small, large = PROCESS_BYTES + 60 * MIB, 8 << 30  # the weights take 92 MiB

    def estimate(memory_bytes: int, machine_bytes: int) -> int:
        call = loader(memory_bytes, machine_bytes).estimate("m", config, ModelMemory(0), lambda *_: None)
        return asyncio.run(call).main

    assert estimate(small, small) == small
    assert small < estimate(small, large) < small + 60 * MIB
    assert estimate(large, large) < large


def test_it_answers_and_leaves_for_another(smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    (tmp_path / "b.gguf").write_bytes(tiny_gguf())
    usable = PROCESS_BYTES + 60 * MIB
    monkeypatch.setattr("octavo.backends.cpu.memory", lambda: MemoryBudget(60 * MIB + 256 * MIB))
    options = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    paths = {"large": smollm2_path, "b": tmp_path / "b.gguf"}
    configs = {name: EngineConfig(model=str(path), **options) for name, path in paths.items()}

    async def main() -> None:
        manager = ModelManager(configs, loader(usable, usable), limit=ModelMemory(usable))
        try:
            await manager.load("large")
            async with manager.use("large") as model:
                params = SamplingParams(temperature=0, max_tokens=4)
                stream = await model.client.generate(GenerationRequest(prompt=Prompt([1, 2]), params=params))
                tokens = [token async for output in stream for token in output.outputs[0].token_ids]
                assert len(tokens) == 4
            await manager.load("b")
            assert [(entry.name, entry.state) for entry in manager.entries] == [("large", "unloaded"), ("b", "loaded")]
        finally:
            await manager.close()
        refusing = ModelManager(configs, loader(usable, usable + MIB), limit=ModelMemory(usable))
        with pytest.raises(InsufficientMemoryError, match=r"large needs .* but models_memory is .*; raise it"):
            await refusing.load("large")
        await refusing.close()

    asyncio.run(main())


def warmed(tokenizer: Tokenizer, script: Script) -> tuple[FakeClient, float]:
    """The client afterwards, and the seconds it took."""
    client = FakeClient(tokenizer, script)
    model = fake_model(tokenizer, client)

    async def main() -> float:
        await asyncio.to_thread(model.prompts.encode_chat, [{"role": "user", "content": "Hello"}])
        began = time.monotonic()
        await warm_up(model.prompts, client)
        await wait_until_async(lambda: all(stream.is_closed for stream in client.streams))
        return time.monotonic() - began

    try:
        return client, asyncio.run(main())
    finally:
        model.prompts.close()


def test_the_engine_makes_its_first_token_before_anybody_asks(smollm2_tokenizer: Tokenizer) -> None:
    client, _ = warmed(smollm2_tokenizer, Script(["Hello"]))
    [request] = client.requests
    assert (len(request.prompt.token_ids), request.params.max_tokens) == (1, 1)
    assert not request.is_measured
    assert [stream.is_closed for stream in client.streams] == [True]


def test_it_is_not_waited_for(smollm2_tokenizer: Tokenizer) -> None:
    client, seconds = warmed(smollm2_tokenizer, Script([], never_ends=True))
    assert seconds < 10
    assert [stream.is_closed for stream in client.streams] == [True]


@pytest.mark.parametrize(
    "script", [Script(refusal=UsageError("it only embeds")), Script([], error=EngineDeadError("it fell"))]
)
def test_an_engine_that_cannot_keeps_nobody_from_asking(smollm2_tokenizer: Tokenizer, script: Script) -> None:
    warmed(smollm2_tokenizer, script)


@dataclass(frozen=True, slots=True)
class SharedDevice(SmallDevice):
    """One whose memory all models share. held: bytes of those that are loaded, by name."""

    held: dict[str, int] = field(default_factory=dict)

    def memory(self) -> MemoryBudget:
        return MemoryBudget(self.total_memory() - sum(self.held.values()))


class PlacingLoader(ModelLoader):
    """Places each model on the device as its engine would, instead of starting it."""

    device: SharedDevice
    tokenizer: Tokenizer
    placed: dict[str, Sizes]

    async def load(self, name: str, config: EngineConfig, _progress: LoadProgress) -> ServedModel:
        config = self._plans[name].config
        with closing(open_checkpoint(Path(config.model))) as checkpoint:
            sizes = model_sizes(checkpoint, config, config.max_model_len)
        on_device = sizes.on(device=True) if isinstance(sizes, SplitSizes) else sizes
        cache = config.kv_cache_bytes * on_device.cache.block_token_bytes // sizes.cache.block_token_bytes
        self.device.held[name] = on_device.weight_bytes + on_device.workspace_bytes + cache
        self.placed[name] = sizes
        return fake_model(self.tokenizer, FakeClient(self.tokenizer), name=name)

    async def unload(self, model: ServedModel) -> None:
        del self.device.held[model.name]
        await super().unload(model)


Place = Callable[[Mapping[str, int], int], tuple[str, PlacingLoader]]


@pytest.fixture
def place(smollm2_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Place:
    """Loads models of so many layers in turn on a device with so many bytes; their states afterwards."""
    monkeypatch.setattr("octavo.engine.loading.model_memory._CONTEXT_BYTES", 1 << 20)

    def run(layers: Mapping[str, int], usable: int) -> tuple[str, PlacingLoader]:
        device = SharedDevice(torch.device("cpu"), torch.float32, usable=usable)
        cpu = get_backend("cpu")
        monkeypatch.setattr("octavo.engine.loading.devices.get_backend", lambda n: cpu if n == "cpu" else device)
        options = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 64, "backend": "torch"}
        options["gpu_offload"] = "cpu"
        configs = {}
        for name, count in layers.items():
            path = tmp_path / f"{name}.gguf"
            path.write_bytes(wide_gguf(count))
            configs[name] = EngineConfig(model=str(path), **options)
        shares = MemoryShares.of(machine_memory(next(iter(configs.values()))), None, len(configs))
        placing = PlacingLoader(ServerConfig(), ServerMetrics("vllm"), NoReport(), shares)
        placing.device, placing.tokenizer, placing.placed = device, smollm2_tokenizer, {}

        async def main() -> str:
            manager = ModelManager(configs, placing, limit=shares.limit)
            for name in configs:
                await manager.load(name)
                assert device.memory().available_bytes >= 256 * MIB  # nobody took what was not there
            states = " ".join(f"{entry.name}:{entry.state}" for entry in manager.entries)
            await manager.close()
            return states

        return asyncio.run(main()), placing

    return run


def test_a_model_that_a_gpu_is_too_small_for_takes_what_the_others_leave(place: Place) -> None:
    states, placing = place({"small": 1, "large": 8}, 46 * MIB)
    assert states == "small:loaded large:loaded"
    assert not isinstance(placing.placed["small"], SplitSizes)
    large = placing.placed["large"]
    assert isinstance(large, SplitSizes)
    assert 0 < large.placement.device_layers < 8
    held, sizes = large.on(device=True), placing.placed["small"]
    assert sizes.weight_bytes + held.weight_bytes <= 46 * MIB


def test_models_that_fit_a_gpu_only_in_turns_take_turns(place: Place) -> None:
    states, placing = place({"a": 3, "b": 3}, 40 * MIB)
    assert states == "a:unloaded b:loaded"
    assert not any(isinstance(sizes, SplitSizes) for sizes in placing.placed.values())


def test_models_that_fit_a_gpu_together_stay_there(place: Place) -> None:
    states, placing = place({"a": 1, "b": 1, "c": 1}, 80 * MIB)
    assert states == "a:loaded b:loaded c:loaded"
    assert not any(isinstance(sizes, SplitSizes) for sizes in placing.placed.values())
