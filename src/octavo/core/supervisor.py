"""Keeps an engine running: detects its death or stall, restarts it, and gives up after repeated failures."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from octavo.config import EngineConfig, LoadProgress
from octavo.core.engine_process import EngineProcess
from octavo.core.liveness import run_queue_meter
from octavo.core.wire import EngineMessage, Failed, Heartbeat, Loading, Ready, to_error
from octavo.engine.client import EngineState, EngineStatus, ModelInfo
from octavo.engine.metrics import EngineMetrics
from octavo.errors import EngineDeadError, GraphError, ModelLoadError, OctavoError, UsageError

logger = logging.getLogger(__name__)

# A stall: no heartbeat for this time, or no step while work waits and nothing computes.
STALL_S = 1.5
# So is a step that computes for so long. Steps are cut to a fraction of a second, but a machine that has other things
# to do, or a model that is large for it, may make seconds of that, and is nevertheless alive.
SLOW_STEP_S = 10.0
CHECK_S = 0.25
MAX_RESTARTS = 3
RESTART_WINDOW_S = 300.0
_FIRST_BACKOFF_S = 0.1
# A check this late shows that this process was stopped, not the engine's.
_MAX_LATE_S = 0.5
# After this time without a heartbeat, check whether it waits for a processor. Asking the system takes a while.
_MISSED_S = 2 * CHECK_S
# A restart would end in the same way.
_PERMANENT = (ModelLoadError, GraphError, UsageError)


def settled(config: EngineConfig, info: ModelInfo) -> EngineConfig:
    """Return the options for the other replicas, and for restarted ones.

    They get as much memory and as many threads as the first one took.
    """
    if config.data_parallel_size == 1:
        return config
    return replace(
        config,
        device=None,
        backend="cpu",
        data_parallel_size=1,
        kv_cache_memory=info.kv_cache_bytes or None,
        num_threads=info.num_threads,
    )


class Supervisor:
    """Keeps one engine running, in one process after another. Belongs to the event loop in which it is created."""

    def __init__(
        self,
        config: EngineConfig,
        on_message: Callable[[EngineMessage], None],
        on_down: Callable[[], None],
        *,
        stall_timeout_s: float,
        in_thread: bool,
        on_progress: LoadProgress | None,
    ) -> None:
        """Start the first engine; see `ProcessClient`.

        on_message: called with messages about requests.
        on_down: called when the engine can no longer answer its requests, because it is dead or stalled.
        in_thread: an engine that fails stays dead, and one that has stalled cannot be killed.
        """
        self._config = config
        self._on_message = on_message
        self._on_down = on_down
        self._stall_timeout_s = math.inf if in_thread else stall_timeout_s
        self._in_thread = in_thread
        self._on_progress = on_progress
        self._loop = asyncio.get_running_loop()
        self.state = EngineState.LOADING
        self.reason: str | None = None
        self.info: ModelInfo | None = None
        self._error: OctavoError | None = None  # the error that the engine reported before it ended
        self._heartbeat: Heartbeat | None = None
        self._heartbeat_at = 0.0
        self._progress_of_load = 0.0
        self._restarts: deque[float] = deque()
        self._num_restarts = 0
        self._changed = asyncio.Event()
        self._killing: asyncio.Task[None] | None = None
        self._restart_timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._spawn()
        self._is_starved = False
        self._check_due = self._loop.time() + CHECK_S
        self._check_timer = self._loop.call_at(self._check_due, self._check)

    @property
    def retry_after_s(self) -> float:
        """The estimated seconds until the engine may be ready again."""
        if self.state is EngineState.STALLED or self.info is None:
            return 1.0
        return 1.0 + sum(self.info.load_seconds.values())

    def send(self, data: bytes) -> bool:
        """See `EngineProcess.send`."""
        return self._process.send(data)

    def status(self) -> EngineStatus:
        beat = self._heartbeat
        age_s = beat.last_step_age_s if beat is not None else None
        return EngineStatus(
            self.state,
            self.reason,
            self._process.pid,
            last_step_age_s=None if age_s is None else age_s + self._silence_s,
            num_restarts=self._num_restarts,
            load_progress=self._progress_of_load,
            metrics=beat.metrics if beat is not None else EngineMetrics(),
        )

    async def wait_ready(self) -> None:
        """Return when the engine accepts requests; raise the error if it never will."""
        while self.state in (EngineState.LOADING, EngineState.RESTARTING):
            self._changed.clear()
            await self._changed.wait()
        if self.state is EngineState.DEAD:
            raise self._error or EngineDeadError(f"the engine has ended: {self.reason}")

    async def close(self) -> None:
        """End the engine and its process. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._check_timer.cancel()
        if self._restart_timer is not None:
            self._restart_timer.cancel()
        if self._killing is not None:
            self._killing.cancel()
        self._set(EngineState.DEAD, "it was closed")
        self._on_down()
        await self._process.close()

    def _spawn(self) -> None:
        self._process = EngineProcess(self._config, self._receive, self._note_exit, in_thread=self._in_thread)
        self._run_queue = run_queue_meter(self._process.pid)

    # --- messages of the engine ---

    def _receive(self, message: EngineMessage) -> None:
        if isinstance(message, Heartbeat):
            self._heartbeat = message
            self._heartbeat_at = time.monotonic()
            self._judge()
        elif isinstance(message, Loading):
            self._progress_of_load = message.bytes_done / max(message.bytes_total, 1)
            if self._on_progress is not None:
                self._on_progress(message.phase, message.bytes_done, message.bytes_total)
        elif isinstance(message, Ready):
            self.info = message.info
            self._config = settled(self._config, message.info)
            self._progress_of_load = 1.0
            self._heartbeat_at = time.monotonic()
            self._set(EngineState.READY)
        elif isinstance(message, Failed):
            self._error = to_error(message.problem)
        else:
            self._on_message(message)

    # --- standstill ---

    @property
    def _silence_s(self) -> float:
        return time.monotonic() - self._heartbeat_at

    @property
    def _stalled_s(self) -> float:
        """The number of seconds without progress."""
        silence_s = self._silence_s
        if silence_s > STALL_S or self._heartbeat is None:
            return silence_s
        return self._heartbeat.stalled_s

    @property
    def _is_stalled(self) -> bool:
        """True if the process has stalled.

        Up to a time limit, a process that computes or waits for a processor is considered slow, not stalled.
        """
        if self._silence_s > STALL_S:
            is_slow = self._is_starved
        else:
            is_slow = self._heartbeat is not None and self._heartbeat.is_computing
        limit_s = min(SLOW_STEP_S, self._stall_timeout_s) if is_slow else STALL_S
        return self._stalled_s > limit_s

    def _check(self) -> None:
        now = self._loop.time()
        if now - self._check_due > _MAX_LATE_S:
            self._heartbeat_at = time.monotonic()
        if self._silence_s > _MISSED_S:
            self._is_starved = self._run_queue.sample()
        else:
            self._run_queue.forget()
        self._check_due = now + CHECK_S
        self._check_timer = self._loop.call_at(self._check_due, self._check)
        self._judge()

    def _judge(self) -> None:
        if self.state not in (EngineState.READY, EngineState.STALLED):
            return
        stalled_s = self._stalled_s
        if not self._is_stalled:
            if self.state is EngineState.STALLED:
                logger.warning("the engine is making progress again")
                self._set(EngineState.READY)
            return
        what = "no sign of life" if self._silence_s > STALL_S else "no step while requests wait"
        reason = f"{what} for {stalled_s:.1f} s"
        if self.state is EngineState.READY:
            logger.error("the engine has stalled: %s", reason)
            self._set(EngineState.STALLED, reason)
            self._on_down()
        self.reason = reason
        if stalled_s > self._stall_timeout_s and self._killing is None:
            logger.error("killing the engine's process %d: %s", self._process.pid, reason)
            self._killing = self._loop.create_task(self._process.kill_stalled())

    # --- death ---

    def _note_exit(self, how: str) -> None:
        if self._is_closed:
            return
        self._killing = None
        error, self._error = self._error, None
        reason = str(error) if error is not None else how
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > RESTART_WINDOW_S:
            self._restarts.popleft()
        if self.info is None or isinstance(error, _PERMANENT) or self._in_thread:
            self._error = error
            self._die(reason)
        elif len(self._restarts) >= MAX_RESTARTS:
            minutes = RESTART_WINDOW_S / 60
            self._die(f"it ended {MAX_RESTARTS + 1} times within {minutes:.0f} minutes, the last time: {reason}")
        else:
            backoff_s = _FIRST_BACKOFF_S * 2 ** len(self._restarts)
            self._restarts.append(now)
            logger.error("%s; restarting it in %.1f s", reason, backoff_s)
            self._set(EngineState.RESTARTING, reason)
            self._on_down()
            self._restart_timer = self._loop.call_later(backoff_s, self._restart)

    def _restart(self) -> None:
        self._num_restarts += 1
        self._heartbeat = None
        self._progress_of_load = 0.0
        try:
            self._spawn()
        except EngineDeadError as error:
            self._note_exit(str(error))

    def _die(self, reason: str) -> None:
        logger.error("giving up on the engine: %s", reason)
        self._check_timer.cancel()
        self._set(EngineState.DEAD, reason)
        self._on_down()

    def _set(self, state: EngineState, reason: str | None = None) -> None:
        self.state = state
        self.reason = reason
        self._changed.set()
