"""The client for an engine in its own process."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np

from octavo.config import EngineConfig, LoadProgress
from octavo.core.supervisor import Supervisor
from octavo.core.wire import (
    Abort,
    ActOnSlot,
    Adapt,
    AskMetrics,
    EngineMessage,
    Reply,
    Sleep,
    Step,
    encode,
    encode_request,
    to_error,
)
from octavo.engine.answer_stream import MergedStream
from octavo.engine.client import EngineState, EngineStatus, ModelInfo, refusal
from octavo.engine.metrics import EngineMetrics
from octavo.engine.slots import SlotAction, SlotReport
from octavo.errors import EngineDeadError, OctavoError, UsageError
from octavo.generation_request import GenerationRequest
from octavo.outputs import PoolingOutput

REST_S = 60.0  # for an engine to fall asleep or wake up: its weights are copied from and to main memory


class ProcessClient:
    """Implements `octavo.engine.client.EngineClient`."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        stall_timeout_s: float = 30.0,
        in_thread: bool = False,
        on_progress: LoadProgress | None = None,
    ) -> None:
        """Start loading a model; `wait_ready` waits until it is loaded. Call it from a running event loop.

        stall_timeout_s: if an engine process makes no step for this time while work waits, it is killed and restarted.
        in_thread: for debugging, the engine has no process of its own; if it fails, it stays dead.
        on_progress: called with (phase, bytes loaded, total bytes).
        Raises EngineDeadError if the system provides no process.
        """
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._streams: dict[str, MergedStream] = {}
        self._replies: dict[str, asyncio.Future[Any]] = {}  # to requests and questions, by id
        self._supervisor = Supervisor(
            config,
            self._receive,
            self._note_down,
            stall_timeout_s=stall_timeout_s,
            in_thread=in_thread,
            on_progress=on_progress,
        )

    @property
    def replicas(self) -> tuple[ProcessClient, ...]:
        return (self,)

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
        try:
            await self._ask(request_id, data)
        except BaseException:
            self._abort(request_id)
            raise
        return stream

    async def metrics(self) -> EngineMetrics:
        self._check_ready()
        question_id = f"metrics-{next(self._ids)}"
        metrics: EngineMetrics = await self._ask(question_id, encode(AskMetrics(question_id)))
        return metrics

    async def restart(self) -> None:
        raise UsageError(
            "the only engine cannot be restarted while it serves requests; start the server with "
            "--data-parallel-size of at least 2, or unload and load the model",
            code="no_replicas",
        )

    async def sleep(self) -> None:
        await self._rest(is_over=False)

    async def wake_up(self) -> None:
        await self._rest(is_over=True)

    async def _rest(self, *, is_over: bool) -> None:
        self._check_ready()
        question_id = f"sleep-{next(self._ids)}"
        try:
            await asyncio.wait_for(self._ask(question_id, encode(Sleep(question_id, is_over))), REST_S)
        except asyncio.TimeoutError:
            what = "woken up" if is_over else "fallen asleep"
            raise refusal(
                EngineState.STALLED, f"it has not {what} within {REST_S:g} s; if this persists, restart the server"
            ) from None

    async def act_on_slot(self, action: SlotAction) -> SlotReport:
        self._check_ready()
        question_id = f"slot-{next(self._ids)}"
        reply: SlotReport = await self._ask(question_id, encode(ActOnSlot(question_id, action)))
        return reply

    async def add_adapter(self, name: str, path: str, scale: float) -> None:
        await self._adapt(name, path, scale)

    async def remove_adapter(self, name: str) -> None:
        await self._adapt(name, "", 1.0)

    async def _adapt(self, name: str, path: str, scale: float) -> None:
        self._check_ready()
        question_id = f"adapter-{next(self._ids)}"
        await self._ask(question_id, encode(Adapt(question_id, name, path, scale)))

    async def close(self) -> None:
        await self._supervisor.close()

    def _check_ready(self) -> None:
        if self._supervisor.state is not EngineState.READY:
            raise self._refusal()

    def _refusal(self) -> OctavoError:
        supervisor = self._supervisor
        return refusal(supervisor.state, supervisor.reason, supervisor.retry_after_s)

    async def _ask(self, question_id: str, data: bytes) -> Any:
        """Send a message and wait for the reply."""
        reply = self._replies[question_id] = self._loop.create_future()
        try:
            if not self._supervisor.send(data):
                raise refusal(EngineState.STALLED, "it does not read its messages")
            return await reply
        finally:
            del self._replies[question_id]

    def _abort(self, request_id: str) -> None:
        if self._streams.pop(request_id, None) is not None:
            self._supervisor.send(encode(Abort(request_id)))

    # --- messages of the engine ---

    def _receive(self, message: EngineMessage) -> None:
        if isinstance(message, Step):
            self._deliver(message)
        elif isinstance(message, Reply):
            reply = self._replies.get(message.question_id)
            if reply is None or reply.done():
                return
            if message.problem is None:
                reply.set_result(message.metrics if message.slot is None else message.slot)
            else:
                reply.set_exception(to_error(message.problem))

    def _deliver(self, step: Step) -> None:
        """Pass outputs to their streams. Outputs of aborted requests may still arrive."""
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
        """End everything that waits for an engine that does not answer.

        Streams survive a stall, because it may pass.
        """
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(self._refusal())
        if self._supervisor.state is EngineState.STALLED:
            return
        reason = self._supervisor.reason or "for an unknown reason"
        for stream in self._streams.values():
            stream.fail(EngineDeadError(f"the engine stopped while the request ran: {reason}"))
        self._streams.clear()
