"""An engine in a process of its own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from octavo.batch import Float32
from octavo.config import EngineConfig, LoadProgress
from octavo.core.client import EngineState, EngineStatus, GenerateRequest, ModelInfo
from octavo.core.messages import (
    Abort,
    Accepted,
    AskMetrics,
    Embedded,
    FromEngine,
    Metrics,
    Rejected,
    Step,
    encode,
    encode_prompt,
    encode_request,
    to_error,
)
from octavo.core.refusals import refusal
from octavo.core.stream import MergedStream
from octavo.core.supervisor import Supervisor
from octavo.errors import EngineDeadError, OctavoError
from octavo.outputs import Logprob, RequestMetrics, RequestOutput


class _Running:
    """A request in the engine, and what of its outputs does not travel again."""

    __slots__ = ("answer", "metrics", "prompt", "prompt_logprobs", "prompt_token_ids", "stream")

    def __init__(self, request: GenerateRequest, stream: MergedStream, answer: asyncio.Future[None]) -> None:
        self.prompt = request.prompt
        self.prompt_token_ids = list(request.prompt_token_ids)
        self.stream = stream
        self.answer = answer  # done when the engine has taken or refused it
        self.metrics = RequestMetrics()
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None


class ProcessClient:
    """Implements `octavo.core.client.EngineClient`."""

    def __init__(
        self, config: EngineConfig, *, stall_timeout_s: float, on_progress: LoadProgress | None = None
    ) -> None:
        """Spawns the engine's process; see `start.start_client`."""
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._running: dict[str, _Running] = {}
        self._questions: dict[int, asyncio.Future[dict[str, object]]] = {}
        self._embeddings: dict[str, asyncio.Future[Float32]] = {}
        self._supervisor = Supervisor(config, stall_timeout_s, self._receive, self._note_down, on_progress)

    @property
    def info(self) -> ModelInfo:
        if self._supervisor.info is None:
            raise EngineDeadError("the engine was not ready yet; await wait_ready() first")
        return self._supervisor.info

    def status(self) -> EngineStatus:
        return self._supervisor.status()

    async def wait_ready(self) -> None:
        await self._supervisor.wait_ready()

    async def generate(self, request: GenerateRequest) -> MergedStream:
        self._check_ready()
        request_id = f"request-{next(self._ids)}"
        data = encode_request(request_id, request)
        running = _Running(request, MergedStream(request_id, self._abort), self._loop.create_future())
        self._running[request_id] = running
        try:
            self._send(data)
            await running.answer
        except asyncio.CancelledError:
            self._abort(request_id)
            raise
        except OctavoError:
            self._running.pop(request_id, None)
            raise
        return running.stream

    async def embed(self, prompts: Sequence[Sequence[int]], *, pooling: Literal["mean", "last"]) -> list[Float32]:
        self._check_ready()
        messages = [(f"embedding-{next(self._ids)}", prompt) for prompt in prompts]
        data = [encode_prompt(request_id, prompt, pooling) for request_id, prompt in messages]
        answers = {request_id: self._loop.create_future() for request_id, _ in messages}
        self._embeddings |= answers
        try:
            for message in data:
                self._send(message)
            return list(await asyncio.gather(*answers.values()))
        finally:
            for request_id, answer in answers.items():
                del self._embeddings[request_id]
                if not answer.done() or answer.cancelled():
                    self._supervisor.send(encode(Abort(request_id)))

    async def metrics(self) -> dict[str, object]:
        self._check_ready()
        question = next(self._ids)
        answer: asyncio.Future[dict[str, object]] = self._loop.create_future()
        self._questions[question] = answer
        try:
            self._send(encode(AskMetrics(question)))
            return await answer
        finally:
            self._questions.pop(question, None)

    async def close(self) -> None:
        await self._supervisor.close()

    def _check_ready(self) -> None:
        if not self._supervisor.is_ready:
            raise self._refusal()

    def _refusal(self) -> OctavoError:
        supervisor = self._supervisor
        return refusal(supervisor.state, supervisor.reason, supervisor.retry_after_s)

    def _send(self, data: bytes) -> None:
        if not self._supervisor.send(data):
            raise refusal(EngineState.STALLED, "it leaves its messages unread")

    def _abort(self, request_id: str) -> None:
        if self._running.pop(request_id, None) is not None:
            self._supervisor.send(encode(Abort(request_id)))

    # --- what the engine says ---

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, Step):
            self._deliver(message)
        elif isinstance(message, (Accepted, Rejected)):
            running = self._running.get(message.request_id)
            if running is None or running.answer.done():
                return
            if isinstance(message, Accepted):
                running.answer.set_result(None)
            else:
                running.answer.set_exception(to_error(message.problem))
        elif isinstance(message, Embedded):
            embedding = self._embeddings.get(message.request_id)
            if embedding is None or embedding.done():
                return
            if message.problem is None:
                embedding.set_result(np.frombuffer(message.vector, np.float32))
            else:
                embedding.set_exception(to_error(message.problem))
        elif isinstance(message, Metrics):
            question = self._questions.get(message.question)
            if question is not None and not question.done():
                question.set_result(message.values)

    def _deliver(self, step: Step) -> None:
        for news in step.news:
            request_id = news.request_id
            running = self._running.get(request_id)
            if running is None:  # aborted while this was on its way
                continue
            if news.metrics is not None:
                running.metrics = news.metrics
            if news.prompt_logprobs is not None:
                running.prompt_logprobs = news.prompt_logprobs
            if news.finished:
                del self._running[request_id]
            running.stream.feed(
                RequestOutput(
                    request_id,
                    running.prompt,
                    running.prompt_token_ids,
                    news.outputs,
                    news.finished,
                    running.prompt_logprobs,
                    running.metrics,
                )
            )
        for failure in step.failures:
            failed = self._running.pop(failure.request_id, None)
            if failed is not None:
                failed.stream.fail(to_error(failure.problem))

    def _note_down(self) -> None:
        """Nobody may wait for an engine that does not answer. Streams outlive a standstill, as it may pass."""
        unanswered: list[asyncio.Future[Any]] = [*self._questions.values(), *self._embeddings.values()]
        for waiting in unanswered:
            if not waiting.done():
                waiting.set_exception(self._refusal())
        is_stalled = self._supervisor.state is EngineState.STALLED
        for request_id, running in list(self._running.items()):
            if not running.answer.done():
                running.answer.set_exception(self._refusal())
                if is_stalled:
                    self._supervisor.send(encode(Abort(request_id)))
            elif not is_stalled:
                running.stream.fail(EngineDeadError(f"the engine stopped while the request ran: {self._reason()}"))
        if not is_stalled:
            self._running.clear()

    def _reason(self) -> str:
        return self._supervisor.reason or "for an unknown reason"
