"""The work of the engine's process: passes requests to the engine, and sends one message per step."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import zmq

from octavo.config import EngineConfig
from octavo.core.faults import Faults
from octavo.core.liveness import CpuMeter
from octavo.core.loaded import create_request, load
from octavo.core.messages import (
    Abort,
    AskMetrics,
    Checked,
    Close,
    Heartbeat,
    Hello,
    LoadFailed,
    Loading,
    MalformedMessageError,
    Metrics,
    Ready,
    StartOrder,
    Step,
    Submit,
    ToEngine,
    decode_request,
    decode_to_engine,
    to_problem,
)
from octavo.core.outbox import Outbox
from octavo.engine.async_engine import Sink
from octavo.engine.metrics import EngineMetrics
from octavo.engine.session import Session
from octavo.errors import EngineDeadError, OctavoError
from octavo.outputs import PoolingOutput, RequestOutput

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.25
_PROGRESS_S = 0.05  # between two messages about the load
_EXIT_FAILED = 70
# Grammars are compiled here, so that other requests are not kept waiting for their answer.
_NUM_CHECKERS = 2


class EngineService:
    """Loads a model and serves it. `run` is the receiving thread; the engine and the heartbeat have their own."""

    def __init__(
        self, order: StartOrder, inbox: zmq.Socket[bytes], outbox: Outbox, faults: Faults, on_hello: Callable[[], None]
    ) -> None:
        """on_hello: called once both processes are connected."""
        self._order = order
        self._inbox = inbox
        self._outbox = outbox
        self._faults = faults
        self._on_hello = on_hello
        self._session: Session | None = None
        self._num_malformed = 0
        self._last_progress = 0.0
        self._checkers = ThreadPoolExecutor(_NUM_CHECKERS, "octavo-check")
        self._lock = threading.Lock()
        self._being_checked: set[str] = set()
        # Only the engine's thread touches these.
        self._news = Step([], {}, {})

    def run(self) -> None:
        """Receives messages until the server closes the engine."""
        self._start_checkers()
        for name, target in (("octavo-load", self._load), ("octavo-heartbeat", self._beat)):
            threading.Thread(target=self._guarded, args=(target,), name=name, daemon=True).start()
        self._guarded(self._receive)
        self._checkers.shutdown(wait=False, cancel_futures=True)
        if self._session is None:  # a load cannot be stopped half-way
            self._exit(0)
        else:
            self._session.close()

    def _start_checkers(self) -> None:
        """While there is memory for them: a thread that fails to start later leaves a request without an answer."""
        all_run = threading.Barrier(_NUM_CHECKERS)
        for _ in range(_NUM_CHECKERS):
            self._checkers.submit(all_run.wait)

    def _guarded(self, target: Callable[[], None]) -> None:
        """No thread may end unnoticed: without one of them the process is of no use."""
        try:
            target()
        except Exception as error:
            logger.exception("a thread of the engine's process failed")
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, reason: str) -> None:
        logger.critical("the engine's process ends: %s", reason)
        self._exit(_EXIT_FAILED)

    def _exit(self, code: int) -> None:
        """Exits at once, whatever other threads do."""
        self._outbox.close()
        os._exit(code)

    # --- the thread that loads ---

    def _load(self) -> None:
        started_at = time.monotonic()
        try:
            self._faults.at("load")
            session, info = load(EngineConfig(**self._order.config), self._report_progress, self._end_round)
        except OctavoError as error:
            self._outbox.send(LoadFailed(to_problem(error)))
            return
        gc.collect()
        gc.freeze()  # what was loaded stays; a collection that walked through it would delay a step by milliseconds
        self._session = session
        phases = {"engine": started_at - self._order.spawned_at, **info.load_seconds}
        self._outbox.send(Ready(replace(info, load_seconds=phases)))
        # The view of the vocabulary takes half a second for 150,000 tokens: before anybody streams, not beside them.
        session.prepare_structured_outputs()

    def _report_progress(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._last_progress >= _PROGRESS_S or done == total:
            self._last_progress = now
            self._outbox.send(Loading(done, total))

    # --- the heartbeat's thread ---

    def _beat(self) -> None:
        meter = CpuMeter()
        while True:
            time.sleep(HEARTBEAT_S)
            is_computing = meter.sample()
            session = self._session
            if session is None:
                self._outbox.send(Heartbeat(EngineMetrics(), 0.0, is_computing, None, self._num_malformed))
                continue
            self._faults.at("heartbeat")
            age_s = session.last_round_age_s if session.metrics.num_steps_total else None
            beat = Heartbeat(session.metrics, session.stalled_s, is_computing, age_s, self._num_malformed)
            self._outbox.send(beat)

    # --- the thread that receives ---

    def _receive(self) -> None:
        while True:
            data = self._inbox.recv()
            self._faults.at("receive")
            try:
                message = decode_to_engine(data)
            except MalformedMessageError as error:
                self._note_malformed(error)
                continue
            if isinstance(message, Close):
                return
            self._handle(message)

    def _handle(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self._begin(message)
        elif isinstance(message, Abort):
            self._abort(message.request_id)
        elif isinstance(message, AskMetrics):
            values = self._session.metrics if self._session is not None else EngineMetrics()
            self._outbox.send(Metrics(message.question, values))
        elif isinstance(message, Hello):
            self._on_hello()

    def _note_malformed(self, error: MalformedMessageError) -> None:
        self._num_malformed += 1
        if self._num_malformed.bit_count() == 1:  # the 1st, 2nd, 4th, 8th: a flood must not fill the log
            logger.warning("a malformed message was dropped, the %dth: %.200s", self._num_malformed, error)

    def _begin(self, message: Submit) -> None:
        with self._lock:
            self._being_checked.add(message.request_id)
        if _has_grammar(message):
            self._checkers.submit(self._guarded, lambda: self._check(message))
        else:
            self._check(message)

    def _check(self, message: Submit) -> None:
        """Answers whether the request is taken, and hands it to the engine if so."""
        request_id = message.request_id
        try:
            if self._session is None:
                raise EngineDeadError("the model is not loaded")
            request = create_request(self._session, request_id, decode_request(message))
        except (OctavoError, MalformedMessageError) as error:
            if isinstance(error, MalformedMessageError):
                self._note_malformed(error)
            with self._lock:
                self._being_checked.discard(request_id)
            self._outbox.send(Checked(request_id, to_problem(error)))
            return
        with self._lock:
            if request_id not in self._being_checked:  # aborted meanwhile
                return
            self._being_checked.remove(request_id)
        self._outbox.send(Checked(request_id))
        self._session.submit(request, self._sink(request_id))

    def _abort(self, request_id: str) -> None:
        with self._lock:
            was_being_checked = request_id in self._being_checked
            self._being_checked.discard(request_id)
        if not was_being_checked and self._session is not None:
            self._session.abort(request_id)

    # --- the engine's thread ---

    def _sink(self, request_id: str) -> Sink:
        """The sink that collects the new outputs of one request."""
        is_first = True

        def note(item: RequestOutput | PoolingOutput | OctavoError) -> None:
            nonlocal is_first
            if isinstance(item, OctavoError):
                self._news.failures[request_id] = to_problem(item)
            elif isinstance(item, PoolingOutput):
                self._news.vectors[request_id] = item.vector.tobytes()
            else:
                prompt_logprobs = item.prompt_logprobs if is_first else None
                is_first = False
                output = RequestOutput(request_id, None, [], item.outputs, item.finished, prompt_logprobs, item.metrics)
                self._news.outputs.append(output)

        return note

    def _end_round(self) -> None:
        news = self._news
        if news.outputs or news.vectors or news.failures:
            self._news = Step([], {}, {})
            self._outbox.send(news)
        failure = self._session.failure if self._session is not None else None
        if failure is not None and failure.__cause__ is not None:  # one that was closed has no cause
            self._fail(str(failure))
        self._faults.at("step")


def _has_grammar(message: Submit) -> bool:
    """True if the request needs a grammar to be compiled. Its fields are not checked yet."""
    try:
        return message.request["params"].get("structured_outputs") is not None
    except (AttributeError, KeyError, TypeError):
        return False
