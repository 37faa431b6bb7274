"""An engine in the server's own process, for debugging and for machines that must not run a second process."""

from __future__ import annotations

import asyncio
import itertools
import os

from octavo.config import EngineConfig, LoadProgress
from octavo.core.client import EngineState, EngineStatus, ModelInfo, refusal
from octavo.core.loaded import SLOW_STEP_S, create_request, load
from octavo.core.stream import MergedStream
from octavo.engine.metrics import EngineMetrics
from octavo.engine.session import Session
from octavo.errors import EngineDeadError, OctavoError
from octavo.generation_request import GenerationRequest
from octavo.outputs import PoolingOutput, RequestOutput


class LocalClient:
    """Implements `octavo.core.client.EngineClient` over a `Session`. An engine that fails here stays dead."""

    def __init__(self, config: EngineConfig, on_progress: LoadProgress | None = None) -> None:
        """Starts to load in a thread. on_progress: called there with (bytes loaded, bytes in all)."""
        self._on_progress = on_progress
        self._load_progress = 0.0
        self._session: Session | None = None
        self._info: ModelInfo | None = None
        self._streams: dict[str, MergedStream] = {}
        self._ids = itertools.count(1)
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._loading = self._loop.create_task(self._load(config))
        # `wait_ready` raises the exception; asyncio need not report that nothing has retrieved it.
        self._loading.add_done_callback(lambda task: task.cancelled() or task.exception())

    @property
    def info(self) -> ModelInfo:
        if self._info is None:
            raise EngineDeadError("the engine was not ready yet; await wait_ready() first")
        return self._info

    def status(self) -> EngineStatus:
        state, reason = self._state()
        session = self._session
        if session is None:
            return EngineStatus(state, reason, os.getpid(), load_progress=self._load_progress)
        age_s = session.last_round_age_s if session.metrics.num_steps_total else None
        return EngineStatus(
            state, reason, os.getpid(), last_step_age_s=age_s, load_progress=1.0, metrics=session.metrics
        )

    async def wait_ready(self) -> None:
        await asyncio.shield(self._loading)

    async def generate(self, request: GenerationRequest) -> MergedStream:
        session = self._ready_session()
        request_id = f"request-{next(self._ids)}"
        # A long prompt or a grammar takes a while to check; other requests of this loop must not wait for it.
        checked = await asyncio.to_thread(create_request, session, request_id, request)
        stream = MergedStream(request_id, request, self._abort)
        self._streams[request_id] = stream

        def hand_over(item: RequestOutput | PoolingOutput | OctavoError) -> None:
            # From the engine's thread. On a closed loop this raises RuntimeError, which ends the request.
            self._loop.call_soon_threadsafe(self._deliver, stream, item)

        session.submit(checked, hand_over)
        return stream

    async def metrics(self) -> EngineMetrics:
        return self._ready_session().metrics

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        await asyncio.wait([self._loading])
        if self._session is not None:
            await asyncio.to_thread(self._session.close)
        for stream in self._streams.values():
            stream.fail(EngineDeadError("the engine was closed while the request ran"))
        self._streams.clear()

    async def _load(self, config: EngineConfig) -> None:
        session, info = await asyncio.to_thread(load, config, self._progress)
        self._session, self._info = session, info

    def _progress(self, done: int, total: int) -> None:
        self._load_progress = done / max(total, 1)
        if self._on_progress is not None:
            self._on_progress(done, total)

    def _state(self) -> tuple[EngineState, str | None]:
        if self._is_closed:
            return EngineState.DEAD, "it was closed"
        if not self._loading.done():
            return EngineState.LOADING, None
        if self._session is None:
            return EngineState.DEAD, str(self._loading.exception())
        if self._session.failure is not None:
            return EngineState.DEAD, str(self._session.failure)
        if self._session.stalled_s > SLOW_STEP_S:
            return EngineState.STALLED, f"no step for {self._session.stalled_s:.1f} s while requests wait"
        return EngineState.READY, None

    def _ready_session(self) -> Session:
        state, reason = self._state()
        if state is not EngineState.READY or self._session is None:
            raise refusal(state, reason)
        return self._session

    def _deliver(self, stream: MergedStream, item: RequestOutput | PoolingOutput | OctavoError) -> None:
        if isinstance(item, OctavoError):
            self._streams.pop(stream.request_id, None)
            stream.fail(item)
            return
        if item.finished:
            self._streams.pop(stream.request_id, None)
        stream.feed(item)

    def _abort(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        if self._session is not None:
            self._session.abort(request_id)
