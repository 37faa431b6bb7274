"""Writes packed weights to disk for the next start, on a separate thread, once the first answer has been given."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from octavo.backends import KeepJob
from octavo.engine.engine_thread import Sink
from octavo.engine.request import Request
from octavo.errors import OctavoError
from octavo.outputs import OutputDelta, PoolingOutput

logger = logging.getLogger(__name__)

_PATIENCE_S = 3.0


class WeightKeeping:
    """The jobs that write one model's packed weights to disk. Each runs once.

    The jobs hold packed weights in memory until they are done.
    """

    def __init__(self, jobs: Sequence[KeepJob]) -> None:
        self._jobs = list(jobs)
        self._lock = threading.RLock()  # garbage collection in `_start` may close a session
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()

    def after(self, request: Request, sink: Sink) -> Sink:
        """Return a sink that also starts the jobs once the request is answered, unless they have started already."""
        if not self._jobs or not request.is_measured:
            return sink

        def put(item: OutputDelta | PoolingOutput | OctavoError) -> None:
            if not isinstance(item, OctavoError) and item.finished:
                self._start()
            sink(item)

        return put

    def wait(self) -> None:
        """Wait until the jobs that have started are done."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Give running jobs a moment, then end them and discard their work. May be called twice."""
        with self._lock:
            thread = self._thread
            if thread is None:
                self._jobs.clear()
        if thread is None or thread is threading.current_thread():  # called by garbage collection on that thread
            self._is_over.set()
            return
        thread.join(_PATIENCE_S)
        self._is_over.set()
        thread.join()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and self._jobs:
                thread = threading.Thread(target=self._run, name="octavo-keep", daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while self._jobs:
            try:
                if not self._is_over.is_set():
                    self._jobs[0](self._is_over.is_set)
            except Exception:
                logger.exception("the packed weights could not be kept for the next start")
            del self._jobs[0]
