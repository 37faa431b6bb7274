"""An engine in a process of its own."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np

from octavo.config import EngineConfig, LoadProgress
from octavo.core.client import EngineState, EngineStatus, ModelInfo, refusal
from octavo.core.messages import (
    Abort,
    AskMetrics,
    Checked,
    FromEngine,
    Metrics,
    Step,
    encode,
    encode_request,
    to_error,
)
from octavo.core.stream import MergedStream
from octavo.core.supervisor import Supervisor
from octavo.engine.metrics import EngineMetrics
from octavo.errors import EngineDeadError, OctavoError
from octavo.generation_request import GenerationRequest
from octavo.outputs import PoolingOutput


class ProcessClient:
    """Implements `octavo.core.client.EngineClient`."""

    def __init__(
        self, config: EngineConfig, *, stall_timeout_s: float, on_progress: LoadProgress | None = None
    ) -> None:
        """Spawns the engine's process; see `start.start_client`."""
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._streams: dict[str, MergedStream] = {}
        self._unanswered: dict[str, asyncio.Future[None]] = {}  # of requests that the engine has not taken yet
        self._questions: dict[int, asyncio.Future[EngineMetrics]] = {}
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

    async def generate(self, request: GenerationRequest) -> MergedStream:
        self._check_ready()
        request_id = f"request-{next(self._ids)}"
        data = encode_request(request_id, request)
        stream = self._streams[request_id] = MergedStream(request_id, request, self._abort)
        answer = self._unanswered[request_id] = self._loop.create_future()
        try:
            self._send(data)
            await answer
        except asyncio.CancelledError:
            self._abort(request_id)
            raise
        except OctavoError:
            self._streams.pop(request_id, None)
            raise
        finally:
            del self._unanswered[request_id]
        return stream

    async def metrics(self) -> EngineMetrics:
        self._check_ready()
        question = next(self._ids)
        answer: asyncio.Future[EngineMetrics] = self._loop.create_future()
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
        if self._streams.pop(request_id, None) is not None:
            self._supervisor.send(encode(Abort(request_id)))

    # --- messages of the engine ---

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, Step):
            self._deliver(message)
        elif isinstance(message, Checked):
            answer = self._unanswered.get(message.request_id)
            if answer is None or answer.done():
                return
            if message.problem is None:
                answer.set_result(None)
            else:
                answer.set_exception(to_error(message.problem))
        elif isinstance(message, Metrics):
            question = self._questions.get(message.question)
            if question is not None and not question.done():
                question.set_result(message.values)

    def _deliver(self, step: Step) -> None:
        """Passes outputs to their streams; those of aborted requests may still arrive."""
        for output in step.outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.feed(output)
                if output.finished:
                    del self._streams[output.request_id]
        for request_id, vector in step.vectors.items():
            if (stream := self._streams.pop(request_id, None)) is not None:
                stream.feed(PoolingOutput(request_id, np.frombuffer(vector, np.float32), stream.num_prompt_tokens))
        for request_id, problem in step.failures.items():
            if (stream := self._streams.pop(request_id, None)) is not None:
                stream.fail(to_error(problem))

    def _note_down(self) -> None:
        """Ends all waiting for an engine that does not answer. Streams survive a stall, because it may pass."""
        unanswered: list[asyncio.Future[Any]] = [*self._questions.values(), *self._unanswered.values()]
        for waiting in unanswered:
            if not waiting.done():
                waiting.set_exception(self._refusal())
        if self._supervisor.state is EngineState.STALLED:
            for request_id in self._unanswered:
                self._supervisor.send(encode(Abort(request_id)))
            return
        for request_id, stream in self._streams.items():
            if request_id not in self._unanswered:
                stream.fail(EngineDeadError(f"the engine stopped while the request ran: {self._reason()}"))
        self._streams.clear()

    def _reason(self) -> str:
        return self._supervisor.reason or "for an unknown reason"
