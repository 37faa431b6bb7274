"""Finds a model, starts its engine and reads its tokenizer: what `ModelManager` asks for."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from octavo.core.client import EngineClient
from octavo.core.start import start_client
from octavo.engine.prompts import PromptEncoder
from octavo.loader.checkpoint import open_checkpoint
from octavo.loader.hub import resolve_model
from octavo.server.config import ServerConfig
from octavo.server.metrics import ServerMetrics
from octavo.server.model_manager import ModelSpec
from octavo.server.observed_client import ObservedClient
from octavo.server.served_model import ServedModel
from octavo.server.tool_parsers import find_tool_format
from octavo.tokenizer.tokenizer import Tokenizer, load_tokenizer

T = TypeVar("T")


class LoadReport(Protocol):
    """Who hears how loading goes on. Called from any thread."""

    def progress(self, what: str, done: int, total: int) -> None:
        """done, total: bytes of a download or a load."""

    def phase(self, name: str, seconds: float) -> None:
        """A phase is over."""


class ModelLoader:
    """Implements `octavo.server.model_manager.Loader`."""

    def __init__(self, config: ServerConfig, metrics: ServerMetrics | None, report: LoadReport) -> None:
        self._config = config
        self._metrics = metrics
        self._report = report

    async def estimate_bytes(self, spec: ModelSpec) -> int:
        path = await self._resolve(spec)
        return path.stat().st_size

    async def load(self, spec: ModelSpec) -> ServedModel:
        began = time.monotonic()
        path = await self._resolve(spec)
        self._report.phase("find", time.monotonic() - began)
        client: EngineClient = start_client(
            dataclasses.replace(spec.engine, model=str(path)),
            in_process=self._config.in_process,
            stall_timeout_s=self._config.stall_timeout,
            on_progress=lambda done, total: self._report.progress(f"loading {spec.name}", done, total),
        )
        try:
            tokenizer, seconds = await _in_thread(lambda: _read_tokenizer(path))
            await client.wait_ready()
        except BaseException:
            await client.close()
            raise
        for phase, phase_s in client.info.load_seconds.items():
            self._report.phase(phase, phase_s)
        self._report.phase("tokenizer", seconds)
        if self._metrics is not None:
            client = ObservedClient(client, self._metrics, spec.name)
        return ServedModel(
            name=spec.name,
            client=client,
            prompts=PromptEncoder(tokenizer, client.info.eos_token_id),
            tool_format=find_tool_format(tokenizer.chat_template or ""),
        )

    async def unload(self, model: ServedModel) -> None:
        model.prompts.close()
        await model.client.close()

    async def _resolve(self, spec: ModelSpec) -> Path:
        def progress(file: str, done: int, total: int) -> None:
            self._report.progress(f"downloading {file}", done, total)

        return await _in_thread(lambda: resolve_model(spec.engine.model, progress=progress))


def _read_tokenizer(path: Path) -> tuple[Tokenizer, float]:
    began = time.monotonic()
    checkpoint = open_checkpoint(path)
    try:
        return load_tokenizer(checkpoint), time.monotonic() - began
    finally:
        checkpoint.close()


async def _in_thread(call: Callable[[], T]) -> T:
    """The result of `call()`, made in a thread that does not keep the process from ending (a download may hang)."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():  # nobody waits any more
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = call()
        except BaseException as error:
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="octavo-find-model", daemon=True).start()
    return await future
