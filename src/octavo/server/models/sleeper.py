"""The server's sleep: models are unloaded while nobody uses them, and loaded again for the next request."""

from __future__ import annotations

import asyncio
import logging
import time

from octavo.server.models.model_manager import ModelManager

logger = logging.getLogger(__name__)


class Sleeper:
    """Puts all models to sleep, on request or after a time without requests.

    after_s: seconds without a request, or None to sleep only on request
    level: level of the sleep that begins after this time; see `sleep`
    """

    def __init__(self, models: ModelManager, after_s: float | None = None, level: int = 2) -> None:
        self._models = models
        self._level = level
        self._after_s = after_s
        self._busy_at = time.monotonic()
        self._turn = models.last_turn
        self._task: asyncio.Task[None] | None = None

    @property
    def is_sleeping(self) -> bool:
        """True if no model is ready although the server has started."""
        is_asleep = all(entry.state in ("unloaded", "sleeping") for entry in self._models.entries)
        return self._models.has_begun and is_asleep

    async def sleep(self, level: int) -> None:
        """Put each model to sleep once its requests have finished. Returns when the memory is free.

        level: 1 keeps the weights in main memory and frees GPU memory, 2 frees everything
        """
        rest = self._models.sleep if level == 1 else self._models.unload
        if not self.is_sleeping or (level == 2 and any(entry.state == "sleeping" for entry in self._models.entries)):
            began = time.monotonic()
            await asyncio.gather(*(rest(entry.name) for entry in self._models.entries))
            logger.info("asleep after %.2f s; the next request loads its model again", time.monotonic() - began)

    async def wake_up(self) -> None:
        """Load the first model. Raises the error that prevented it."""
        await self._models.load(None)

    def watch(self, num_requests: int) -> None:
        """Start to sleep if there has been no request for long enough. Call this a few times a second.

        num_requests: number of requests in the server now
        """
        is_used = num_requests > 0 or self._models.is_used  # includes restarts and long loads
        is_busy = is_used or self._models.last_turn != self._turn or self.is_sleeping
        if is_busy or not self._models.has_begun:
            self._busy_at, self._turn = time.monotonic(), self._models.last_turn
        idle_s = time.monotonic() - self._busy_at
        if self._after_s is None or idle_s < self._after_s or (self._task is not None and not self._task.done()):
            return
        logger.info("no request for %g s: entering sleep level %d (--sleep-after)", self._after_s, self._level)
        self._task = asyncio.create_task(self.sleep(self._level), name="sleep")
        self._task.add_done_callback(_report_error)

    async def close(self) -> None:
        """End a sleep that has begun. `ModelManager.close` unloads the remaining models."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})


def _report_error(task: asyncio.Task[None]) -> None:
    """Log the error of a sleep that started without a request, because nobody awaits it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("the models could not be put to sleep: %s", error, exc_info=error)
