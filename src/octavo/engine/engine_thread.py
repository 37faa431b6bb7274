"""The thread that steps the engine. Callers on any thread or event loop get their outputs from it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

from octavo.engine.engine import Engine, Output, RequestFailure
from octavo.engine.request import Request
from octavo.errors import EngineDeadError, OctavoError
from octavo.outputs import OutputDelta, PoolingOutput

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# A client, such as an agent, often sends its next request as soon as it has an answer. If steps are
# long, a short wait saves that request from waiting for a whole step.
_FOLLOW_UP_S = 0.008
_LONG_STEP_S = 10 * _FOLLOW_UP_S
_SAVE_AFTER_S = 0.1  # seconds of idle time

# Receives the items of one request on the engine's thread and must only pass them on: `PoolingOutput` for
# PoolingParams, otherwise `OutputDelta`, or an `OctavoError` as the last item.
Sink: TypeAlias = Callable[[Any], None]


class EngineThread:
    """An `Engine` with its own thread. Every method may be called from any thread."""

    def __init__(self, engine: Engine, on_round_end: Callable[[], None] | None = None) -> None:
        """on_round_end: called on the engine's thread when all sinks have received a step's outputs, and after a
        failure.
        """
        self.engine = engine
        self.last_round_at = time.monotonic()  # when the thread last looked for work
        self._on_round_end = on_round_end
        self._wake = threading.Condition()
        self._added: deque[tuple[Request, Sink]] = deque()
        self._aborted: deque[str] = deque()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._sinks: dict[str, Sink] = {}  # only the engine's thread touches it
        self._is_closing = False
        self.failure: OctavoError | None = None  # why the thread has ended; None while it runs
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request from `Engine.create_request`.

        `sink` receives its outputs; the last one is marked as finished.
        Raises EngineDeadError if the engine has failed or was closed.
        """
        with self._wake:
            if self.failure is not None:
                raise EngineDeadError(f"the engine has stopped: {self.failure}") from self.failure
            if self._is_closing:
                raise EngineDeadError("the engine is closed; create a new LLM")
            self._added.append((request, sink))
            self._wake.notify()

    def abort(self, request_id: str) -> None:
        """End a request within a step. Its sink receives the output with finish_reason `abort`."""
        with self._wake:
            self._aborted.append(request_id)
            self._wake.notify()

    def call(self, task: Callable[[], _T]) -> Future[_T]:
        """Run a task on the engine's thread between two steps. Return a future of its result."""
        future: Future[_T] = Future()
        with self._wake:
            if self.failure is not None or self._is_closing:
                future.set_exception(EngineDeadError("the engine has stopped"))
            else:
                self._calls.append((task, future))
                self._wake.notify()
        return future

    def close(self) -> None:
        """End every request with an error, then stop the thread. May be called twice."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # --- the engine's thread ---

    def _run(self) -> None:
        try:
            while self._take_commands():
                self.engine.start()
                self._publish()  # the outputs of the previous step, while this one runs
                self.engine.prepare()
                if self.engine.finish() > _LONG_STEP_S:
                    self._await_follow_ups(self._publish())
            failure = EngineDeadError("the engine was closed while the request ran")
        except OctavoError as error:
            logger.error("the engine failed: %s", error)
            failure = EngineDeadError(str(error))
            failure.__cause__ = error
        except Exception as error:  # whatever the error, no caller may wait forever
            logger.exception("the engine failed")
            failure = EngineDeadError(f"the engine failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        with self._wake:
            self.failure = failure
            sinks = [*self._sinks.values(), *(sink for _, sink in self._added)]
            self._sinks.clear()
            self._added.clear()
            calls, self._calls = self._calls, deque()
        for _, future in calls:
            future.set_exception(failure)
        for sink in sinks:
            self._hand_over(sink, failure)
        if self._on_round_end is not None:
            self._on_round_end()
        self.engine.close()

    def _publish(self) -> int:
        """Deliver the outputs of a step. Return the number of answered requests."""
        outputs = self.engine.publish()
        for output in outputs:
            self._deliver(output)
        if self._on_round_end is not None:
            self._on_round_end()
        return sum(isinstance(output, OutputDelta) and output.finished for output in outputs)

    def _comes_soon(self) -> bool:
        """Wait briefly for a command, before an idle engine saves its results in a separate step.

        Return True if one comes. The steps of a new request save the results as well, and a client that has just
        received an answer must not wait for a separate step when it continues.
        """
        with self._wake:
            return self._wake.wait_for(
                lambda: bool(self._added or self._aborted or self._calls or self._is_closing), _SAVE_AFTER_S
            )

    def _take_commands(self) -> bool:
        """Wait for work, then execute the callers' submissions and aborts. Return False if the engine is closed."""
        if not self.engine.has_work and self.engine.has_unsaved and not self._comes_soon():
            self.engine.save_computed()
        with self._wake:
            while not (self._added or self._aborted or self._calls or self._is_closing or self.engine.has_work):
                self._wake.wait()
            if self._is_closing:
                return False
            self.last_round_at = time.monotonic()
            added, self._added = self._added, deque()
            aborted, self._aborted = self._aborted, deque()
            calls, self._calls = self._calls, deque()
        for request, sink in added:
            self._add(request, sink)
        for task, future in calls:
            self._run_call(task, future)
        for request_id in aborted:
            output = self.engine.abort(request_id)
            if output is not None:
                self._deliver(output)
        return True

    @staticmethod
    def _run_call(task: Callable[[], _T], future: Future[_T]) -> None:
        try:
            result = task()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    def _await_follow_ups(self, num_answered: int) -> None:
        if num_answered and self.engine.has_work:
            with self._wake:
                self._wake.wait_for(lambda: len(self._added) >= num_answered or self._is_closing, _FOLLOW_UP_S)

    def _add(self, request: Request, sink: Sink) -> None:
        try:
            self.engine.add_request(request)
        except OctavoError as error:
            self._hand_over(sink, error)
        else:
            self._sinks[request.request_id] = sink

    def _deliver(self, output: Output) -> None:
        sink = self._sinks[output.request_id]
        if isinstance(output, RequestFailure):
            is_last = True
            self._hand_over(sink, output.error)
        else:
            is_last = not self._hand_over(sink, output) or output.finished
        if is_last:
            del self._sinks[output.request_id]
            self.engine.abort(output.request_id)

    @staticmethod
    def _hand_over(sink: Sink, item: OutputDelta | PoolingOutput | OctavoError) -> bool:
        """Pass an item to its caller.

        Return False if that fails, for example because the caller's event loop is closed; other callers are not
        affected.
        """
        try:
            sink(item)
        except Exception:
            logger.exception("an output could not be delivered")
            return False
        return True
