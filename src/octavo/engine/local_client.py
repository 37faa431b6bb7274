"""The client of an engine in this process."""

from __future__ import annotations

import asyncio
import os

from octavo.engine.answer_stream import MergedStream
from octavo.engine.client import EngineState, EngineStatus, ModelInfo, refusal
from octavo.engine.metrics import EngineMetrics
from octavo.engine.session import Session
from octavo.engine.slots import SlotAction, SlotReport
from octavo.errors import OctavoError, UsageError
from octavo.generation_request import GenerationRequest
from octavo.outputs import OutputDelta, PoolingOutput


class LocalClient:
    """Implements `octavo.engine.client.EngineClient` for a loaded model. Threads with their own loops may share it.

    `LLM`, which has no event loop, passes its requests to the session directly.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def replicas(self) -> tuple[LocalClient, ...]:
        return (self,)

    @property
    def info(self) -> ModelInfo:
        return self._session.info

    def status(self) -> EngineStatus:
        session = self._session
        if session.is_closed:
            return EngineStatus(EngineState.DEAD, "it was closed", os.getpid(), metrics=session.metrics)
        reason = None if session.failure is None else str(session.failure)
        state = EngineState.READY if reason is None else EngineState.DEAD
        age_s = session.last_round_age_s if session.metrics.num_steps_total else None
        return EngineStatus(state, reason, os.getpid(), age_s, load_progress=1.0, metrics=session.metrics)

    async def wait_ready(self) -> None:
        self._check_ready()

    async def generate(self, request: GenerationRequest, request_id: str | None = None) -> MergedStream:
        """See `EngineClient.generate`.

        request_id: unique while the request runs; None to generate one.
        """
        self._check_ready()
        session, loop = self._session, asyncio.get_running_loop()
        # Long prompts and grammars take time, and other requests of this loop must not wait for them.
        checked = await asyncio.to_thread(session.check, request, request_id)
        stream = MergedStream(checked.request_id, request, session.abort)

        def hand_over(item: OutputDelta | PoolingOutput | OctavoError) -> None:
            # Called on the engine's thread. On a closed loop this raises RuntimeError, which ends the request.
            if isinstance(item, OctavoError):
                loop.call_soon_threadsafe(stream.fail, item)
            else:
                loop.call_soon_threadsafe(stream.feed, item)

        session.submit(checked, hand_over)
        return stream

    async def metrics(self) -> EngineMetrics:
        self._check_ready()
        return self._session.metrics

    async def restart(self) -> None:
        raise UsageError(
            "the engine runs in this process and cannot be restarted; load the model again", code="no_replicas"
        )

    async def sleep(self) -> None:
        self._check_ready()
        await asyncio.wrap_future(self._session.sleep())

    async def add_adapter(self, name: str, path: str, scale: float) -> None:
        await asyncio.to_thread(self._session.add_adapter, name, path, scale)

    async def remove_adapter(self, name: str) -> None:
        adapters = self._session.adapters
        if name in adapters.sources:
            adapters.remove(name)

    async def wake_up(self) -> None:
        self._check_ready()
        await asyncio.wrap_future(self._session.wake_up())

    async def act_on_slot(self, action: SlotAction) -> SlotReport:
        self._check_ready()
        return await asyncio.wrap_future(self._session.act_on_slot(action))

    async def close(self) -> None:
        await asyncio.to_thread(self._session.close)

    def _check_ready(self) -> None:
        status = self.status()
        if status.state is not EngineState.READY:
            raise refusal(status.state, status.reason)
