"""The loader of `ModelManager`: finds a model, starts its engine and reads its tokenizer."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import aclosing, closing, suppress
from pathlib import Path
from typing import Protocol, TypeVar

from octavo.config import EngineConfig, LoadProgress
from octavo.core.process_client import ProcessClient
from octavo.core.replicas import ReplicaClient
from octavo.engine.client import EngineClient
from octavo.engine.loading.model_memory import MemoryShares, ModelMemory, ModelPlan
from octavo.engine.texts.prompt_encoder import PromptEncoder
from octavo.errors import OctavoError
from octavo.generation_request import GenerationRequest
from octavo.loader.checkpoint import open_checkpoint
from octavo.loader.hub import resolve_model
from octavo.prompt import Prompt
from octavo.sampling_params import SamplingParams
from octavo.server.config import ServerConfig
from octavo.server.models.image_reader import ImageReader
from octavo.server.models.served_model import ServedModel
from octavo.server.observability.metrics import ServerMetrics
from octavo.server.observability.observed_client import ObservedClient
from octavo.server.tool_parsers.tool_format import find_tool_format
from octavo.tokenizer import load_tokenizer
from octavo.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")

_FIRST_STEP_S = 0.1


class LoadReport(Protocol):
    """Receives reports about the server's start. May be called from any thread."""

    def progress(self, what: str, done: int, total: int) -> None:
        """Report the progress of a download or a load.

        done, total: bytes
        """

    def phase(self, name: str, seconds: float) -> None:
        """Report that a phase has ended."""

    def ready(self, model: ServedModel) -> None:
        """Report that the default model has been loaded."""


class NoReport:
    """A `LoadReport` that reports nothing."""

    def progress(self, what: str, done: int, total: int) -> None:
        pass

    def phase(self, name: str, seconds: float) -> None:
        pass

    def ready(self, model: ServedModel) -> None:
        pass


class ModelLoader:
    """Starts and stops models' engines.

    shares: memory shares for several models or under a limit, or None for a single model that takes all free memory
    """

    def __init__(
        self,
        config: ServerConfig,
        metrics: ServerMetrics,
        report: LoadReport,
        shares: MemoryShares | None = None,
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._report = report
        self._shares = shares
        self._images = ImageReader(config)
        self._plans: dict[str, ModelPlan] = {}  # the latest plan of each model

    async def estimate(self, name: str, config: EngineConfig, held: ModelMemory, progress: LoadProgress) -> ModelMemory:
        """Estimate the memory that the model will take: weights, workspace and KV cache. The result is 0 if
        memory is not shared among several models.

        The model is downloaded if needed.

        held: memory held by the loaded models
        progress: called from any thread
        """
        shares = self._shares
        if shares is None:
            return ModelMemory(0)
        path = await self._resolve(config, progress)
        plan = self._plans[name] = await _in_thread(lambda: shares.plan(path, config, held))
        return plan.memory

    async def load(self, name: str, config: EngineConfig, progress: LoadProgress) -> ServedModel:
        """Load the model and return it ready for requests. Raises the error that prevented it.

        progress: called from any thread
        """
        began = time.monotonic()
        path = await self._resolve(config, progress)
        self._report.phase("find", time.monotonic() - began)
        if name in self._plans:
            config = self._plans[name].config
        config = dataclasses.replace(config, model=str(path), revision=None)

        def on_progress(phase: str, done: int, total: int) -> None:
            self._report.progress(f"{phase} {name}", done, total)
            progress(phase, done, total)

        client: EngineClient
        stall_timeout_s, in_thread = self._config.stall_timeout, self._config.in_process
        if config.data_parallel_size > 1:
            client = ReplicaClient(config, stall_timeout_s=stall_timeout_s, on_progress=on_progress)
        else:
            client = ProcessClient(
                config, stall_timeout_s=stall_timeout_s, in_thread=in_thread, on_progress=on_progress
            )
        prompts = None
        try:
            tokenizer, seconds = await _in_thread(lambda: _read_tokenizer(path))
            await client.wait_ready()
            for phase, phase_s in client.info.load_seconds.items():
                self._report.phase(phase, phase_s)
            self._report.phase("tokenizer", seconds)
            prompts = PromptEncoder(
                tokenizer,
                client.info.eos_token_id,
                template=config.template_text,
                system=config.system_prompt,
            )
            self._report.phase("template", await warm_up(prompts, client))
        except BaseException:
            if prompts is not None:
                prompts.close()
            await client.close()
            raise
        tool_format = find_tool_format(prompts.tokenizer.template_source(has_tools=True))
        observed = ObservedClient(client, self._metrics, name)
        return ServedModel(name=name, client=observed, prompts=prompts, tool_format=tool_format, images=self._images)

    async def unload(self, model: ServedModel) -> None:
        """Stop the model's engine and free its memory."""
        model.prompts.close()
        await model.client.close()

    async def _resolve(self, config: EngineConfig, progress: LoadProgress) -> Path:
        def on_progress(file: str, done: int, total: int) -> None:
            self._report.progress(f"downloading {file}", done, total)
            progress(f"downloading {file}", done, total)

        return await _in_thread(lambda: resolve_model(config.model, revision=config.revision, progress=on_progress))


async def warm_up(prompts: PromptEncoder, client: EngineClient) -> float:
    """Start the chat template's process, and return the number of seconds that this took. Meanwhile the engine runs its
    first step.

    The first request then need not wait for either. The first step takes several times as long as later steps. The wait
    for it is short, because a step that has begun runs to its end even if nobody needs its token.
    """
    began = time.monotonic()
    first_step = asyncio.create_task(_make_token(client))
    try:
        with suppress(OctavoError):  # it has none, or needs other input: requests get the error
            await _in_thread(lambda: prompts.encode_chat([{"role": "user", "content": "Hello"}]))
        seconds = time.monotonic() - began
        await asyncio.wait({first_step}, timeout=_FIRST_STEP_S)
    finally:
        first_step.cancel()
    return seconds


async def _make_token(client: EngineClient) -> None:
    params = SamplingParams(max_tokens=1, detokenize=False, ignore_eos=True)
    with suppress(OctavoError):  # it cannot generate: requests get the error
        stream = await client.generate(GenerationRequest(prompt=Prompt([0]), params=params, is_measured=False))
        async with aclosing(stream):
            await anext(stream)


def _read_tokenizer(path: Path) -> tuple[Tokenizer, float]:
    began = time.monotonic()
    with closing(open_checkpoint(path)) as checkpoint:
        return load_tokenizer(checkpoint), time.monotonic() - began


async def _in_thread(call: Callable[[], T]) -> T:
    """Return the result of `call()`, run in a thread that does not keep the process from exiting (a download may
    hang).
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # from now on nothing stops the call, even if no request waits for it

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="octavo-find-model", daemon=True).start()
    return await asyncio.wrap_future(future)
