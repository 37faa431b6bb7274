"""The engine's side of the connection: passes requests to the engine, and sends one message per step."""

from __future__ import annotations

import gc
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

from octavo.core.liveness import cpu_meter
from octavo.core.wire import (
    SIZE_BYTES,
    Abort,
    ActOnSlot,
    Adapt,
    AskMetrics,
    EngineMessage,
    Failed,
    Heartbeat,
    Loading,
    Log,
    MalformedMessageError,
    Ready,
    Reply,
    Sleep,
    Start,
    Step,
    Submit,
    decode,
    decode_request,
    encode,
    frame,
    frame_size,
    to_problem,
)
from octavo.engine.engine_thread import Sink
from octavo.engine.metrics import EngineMetrics
from octavo.engine.session import Session
from octavo.engine.slots import SlotReport
from octavo.errors import EngineDeadError, OctavoError
from octavo.outputs import OutputDelta, PoolingOutput

logger = logging.getLogger(__name__)

_HEARTBEAT_S = 0.25
_PROGRESS_S = 0.05  # between two messages about the load
# Grammars are compiled here, so that other requests are not kept waiting for their answer.
_NUM_CHECKERS = 2


class EngineService:
    """Loads a model and serves it.

    `run` runs on the receiving thread; the engine and the heartbeat have threads of their own.
    """

    def __init__(self, sock: socket.socket, *, owns_process: bool) -> None:
        """sock: connected to an `EngineProcess`.
        owns_process: True if the process does nothing but serve this engine.
        """
        self._socket = sock
        self._owns_process = owns_process
        self._session: Session | None = None
        self._loader: threading.Thread | None = None
        self._has_ended = threading.Event()
        self._sending = threading.Lock()
        self._checkers = ThreadPoolExecutor(_NUM_CHECKERS, "octavo-check")
        self._lock = threading.Lock()
        self._being_checked: set[str] = set()
        self._news = Step([], {}, {})  # only the engine's thread touches it

    def run(self) -> None:
        """Serve until the connection ends, and then end the engine."""
        self._guarded(self._receive)
        self._has_ended.set()
        self._checkers.shutdown(wait=False, cancel_futures=True)
        if self._loader is not None:
            self._loader.join()  # a load cannot be stopped half-way
        if self._session is not None:
            self._session.close()
        self._socket.close()

    def send(self, message: EngineMessage) -> None:
        """Send a message. Wait while the server has too many unread bytes. Do nothing once the connection has ended."""
        data = frame(encode(message))
        with self._sending, suppress(OSError):
            self._socket.sendall(data)

    def _guarded(self, target: Callable[..., None], *arguments: object) -> None:
        """Run a thread's target, and make the engine fail if it raises, because the engine is useless if one of its
        threads is missing.
        """
        try:
            target(*arguments)
        except Exception as error:
            logger.exception("a thread of the engine's process failed")
            self._fail(EngineDeadError(f"the engine's process failed: {type(error).__name__}: {error}"))

    def _fail(self, error: OctavoError) -> None:
        """End the connection. If the engine has its own process, that process then ends, whatever its threads are
        doing.
        """
        self.send(Failed(to_problem(error)))
        with suppress(OSError):  # the server was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    # --- the thread that loads ---

    def _load(self, start: Start) -> None:
        times = [time.monotonic()]  # times of the start and of each progress report
        reported_at = 0.0

        def progress(phase: str, done: int, total: int) -> None:
            nonlocal reported_at
            times.append(time.monotonic())
            if times[-1] - reported_at >= _PROGRESS_S or done == total:
                reported_at = times[-1]
                self.send(Loading(phase, done, total))

        try:
            session = Session(start.config, progress, self._end_round, is_replica=True)
        except OctavoError as error:
            self._fail(error)
            return
        begun, first, last = times[0], times[min(1, len(times) - 1)], times[-1]
        phases = {"engine": begun - start.spawned_at, "open": first - begun, "weights": last - first}
        phases["cache"] = time.monotonic() - last
        if self._owns_process:
            gc.collect()
            gc.freeze()  # keep loaded objects out of collections, which would delay a step by milliseconds
        self._session = session
        self.send(Ready(replace(session.info, load_seconds=phases)))
        # Preparing the vocabulary takes half a second for 150,000 tokens, so do it before anybody streams.
        if session.model().engine.texts.generates:
            session.prepare_structured_outputs()

    # --- the heartbeat's thread ---

    def _beat(self) -> None:
        meter = cpu_meter()
        while not self._has_ended.wait(_HEARTBEAT_S):
            self.send(self._heartbeat(is_computing=meter.sample()))

    def _heartbeat(self, *, is_computing: bool) -> Heartbeat:
        session = self._session
        if session is None:
            return Heartbeat(EngineMetrics(), 0.0, is_computing, None)
        age_s = session.last_round_age_s if session.metrics.num_steps_total else None
        return Heartbeat(session.metrics, session.measure_stall(), is_computing, age_s)

    # --- the thread that receives ---

    def _receive(self) -> None:
        with self._socket.makefile("rb") as received:
            while len(head := received.read(SIZE_BYTES)) == SIZE_BYTES:
                data = received.read(frame_size(head))
                try:
                    self._handle(decode(data))
                except MalformedMessageError as error:
                    logger.warning("a malformed message was dropped: %.200s", error)

    def _handle(self, message: EngineMessage) -> None:
        if isinstance(message, Submit):
            self._begin(message)
        elif isinstance(message, Abort):
            self._abort(message.request_id)
        elif isinstance(message, AskMetrics):
            metrics = self._session.metrics if self._session is not None else EngineMetrics()
            self.send(Reply(message.question_id, metrics=metrics))
        elif isinstance(message, Sleep):
            self._sleep(message)
        elif isinstance(message, ActOnSlot):
            self._act_on_slot(message)
        elif isinstance(message, Adapt):
            self._checkers.submit(self._guarded, self._adapt, message)
        elif isinstance(message, Start):
            self._start(message)
        else:
            raise MalformedMessageError(f"{type(message).__name__} is not for the engine")

    def _sleep(self, message: Sleep) -> None:
        """Reply once the engine's thread has released or allocated the memory."""

        def reply(done: Future[None]) -> None:
            error = done.exception()
            problem = to_problem(error) if isinstance(error, Exception) else None
            self.send(Reply(message.question_id, problem))

        if self._session is None:
            self.send(Reply(message.question_id, to_problem(EngineDeadError("the model is not loaded"))))
            return
        done = self._session.wake_up() if message.is_over else self._session.sleep()
        done.add_done_callback(reply)

    def _act_on_slot(self, message: ActOnSlot) -> None:
        def reply(done: Future[SlotReport]) -> None:
            error = done.exception()
            if isinstance(error, Exception):
                self.send(Reply(message.question_id, to_problem(error)))
            else:
                self.send(Reply(message.question_id, slot=done.result()))

        if self._session is None:
            self.send(Reply(message.question_id, to_problem(EngineDeadError("the model is not loaded"))))
            return
        self._session.act_on_slot(message.action).add_done_callback(reply)

    def _adapt(self, message: Adapt) -> None:
        """Read or forget an adapter while steps continue, then reply."""
        problem = None
        try:
            if self._session is None:
                raise EngineDeadError("the model is not loaded")
            if message.path:
                self._session.add_adapter(message.name, message.path, message.scale)
            elif message.name in self._session.adapters.sources:
                self._session.adapters.remove(message.name)
        except OctavoError as error:
            problem = to_problem(error)
        self.send(Reply(message.question_id, problem))

    def _start(self, start: Start) -> None:
        if self._owns_process:
            logging.basicConfig(level=start.log_level, format="%(message)s", handlers=[_LogToServer(self.send)])
        # While there is memory for them: a thread that fails to start later leaves a request without an answer.
        all_run = threading.Barrier(_NUM_CHECKERS)
        for _ in range(_NUM_CHECKERS):
            self._checkers.submit(all_run.wait)
        heart = threading.Thread(target=self._guarded, args=(self._beat,), name="octavo-heartbeat", daemon=True)
        heart.start()
        self._loader = threading.Thread(target=self._guarded, args=(self._load, start), name="octavo-load", daemon=True)
        self._loader.start()

    def _begin(self, message: Submit) -> None:
        with self._lock:
            self._being_checked.add(message.request_id)
        if _has_grammar(message):
            self._checkers.submit(self._guarded, self._check, message)
        else:
            self._check(message)

    def _check(self, message: Submit) -> None:
        """Check a request and reply whether it is accepted. If so, pass it to the engine."""
        request_id = message.request_id
        try:
            if self._session is None:
                raise EngineDeadError("the model is not loaded")
            request = decode_request(message)
            checked = self._session.model().engine.create_request(request_id, request)
        except (OctavoError, MalformedMessageError) as error:
            with self._lock:
                self._being_checked.discard(request_id)
            self.send(Reply(request_id, to_problem(error)))
            return
        with self._lock:
            if request_id not in self._being_checked:  # aborted in the meantime
                return
            self._being_checked.remove(request_id)
        self.send(Reply(request_id))
        self._session.submit(checked, self._sink(request_id))

    def _abort(self, request_id: str) -> None:
        with self._lock:
            was_being_checked = request_id in self._being_checked
            self._being_checked.discard(request_id)
        if not was_being_checked and self._session is not None:
            self._session.abort(request_id)

    # --- the engine's thread ---

    def _sink(self, request_id: str) -> Sink:
        """Return the sink that collects the new outputs of one request."""

        def note(item: OutputDelta | PoolingOutput | OctavoError) -> None:
            if isinstance(item, OctavoError):
                self._news.failures[request_id] = to_problem(item)
            elif isinstance(item, PoolingOutput):
                self._news.vectors[request_id] = item.vector.tobytes()
            else:
                self._news.outputs.append(item)

        return note

    def _end_round(self) -> None:
        news = self._news
        if news.outputs or news.vectors or news.failures:
            self._news = Step([], {}, {})
            self.send(news)
        failure = self._session.failure if self._session is not None else None
        if failure is not None and failure.__cause__ is not None:  # a closed one has no cause
            self._fail(failure)


class _LogToServer(logging.Handler):
    """Sends log records to the server, which writes the log of both processes in its own format."""

    def __init__(self, send: Callable[[Log], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._send(Log(record.levelno, record.name, self.format(record)))
        except Exception:
            self.handleError(record)


def _has_grammar(message: Submit) -> bool:
    """True if a grammar must be compiled for the request. Its fields are not checked yet."""
    try:
        return message.request["params"].get("structured_outputs") is not None
    except (AttributeError, KeyError, TypeError):
        return False
