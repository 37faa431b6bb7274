"""The memory that a model will take, and the steps of loading it before it is ready."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from octavo.backends.memory import MemoryBudget
from octavo.config import EngineConfig
from octavo.errors import EngineDeadError, InsufficientMemoryError, UsageError
from octavo.generation_request import GenerationRequest
from octavo.sampling_params import SamplingParams
from octavo.server.config import ServerConfig
from octavo.server.models.model_loader import PROCESS_BYTES, ModelLoader, warm_up
from octavo.server.models.model_manager import ModelManager
from octavo.server.observability.metrics import ServerMetrics
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import FakeClient, Script, fake_model
from tests.support.tiny_gguf import tiny_gguf

MIB = 1 << 20


class NoReport:
    def progress(self, what: str, done: int, total: int) -> None: ...
    def phase(self, name: str, seconds: float) -> None: ...
    def ready(self, model: object) -> None: ...


def loader(memory_bytes: int, machine_bytes: int) -> ModelLoader:
    config = ServerConfig(in_process=True)
    limits = {"memory_bytes": memory_bytes, "machine_bytes": machine_bytes, "num_models": 2}
    return ModelLoader(config, ServerMetrics("vllm"), NoReport(), **limits)


def test_a_model_larger_than_memory_takes_all_of_it(smollm2_path: Path) -> None:
    """It runs from disk. A limit below the machine's memory is kept: there the model does not fit."""
    config = EngineConfig(model=str(smollm2_path), max_model_len=256, max_num_seqs=2, max_num_batched_tokens=64)
    small, large = PROCESS_BYTES + 60 * MIB, 8 << 30  # the weights take 92 MiB

    def estimate(memory_bytes: int, machine_bytes: int) -> int:
        call = loader(memory_bytes, machine_bytes).estimate_bytes("m", config, lambda *_: None)
        return asyncio.run(call)

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
        manager = ModelManager(configs, loader(usable, usable), memory_bytes=usable)
        try:
            await manager.load("large")
            async with manager.use("large") as model:
                params = SamplingParams(temperature=0, max_tokens=4)
                stream = await model.client.generate(GenerationRequest(prompt_token_ids=[1, 2], params=params))
                tokens = [token async for output in stream for token in output.outputs[0].token_ids]
                assert len(tokens) == 4
            await manager.load("b")
            assert [(entry.name, entry.state) for entry in manager.entries] == [("large", "unloaded"), ("b", "loaded")]
        finally:
            await manager.close()
        refusing = ModelManager(configs, loader(usable, usable + MIB), memory_bytes=usable)
        with pytest.raises(InsufficientMemoryError, match=r"large needs .* and models_memory is .*; raise it"):
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
        await asyncio.sleep(0.01)  # what was cancelled ends
        return time.monotonic() - began

    try:
        return client, asyncio.run(main())
    finally:
        model.prompts.close()


def test_the_engine_makes_its_first_token_before_anybody_asks(smollm2_tokenizer: Tokenizer) -> None:
    client, _ = warmed(smollm2_tokenizer, Script(["Hello"]))
    [request] = client.requests
    assert (len(request.prompt_token_ids), request.params.max_tokens) == (1, 1)
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
