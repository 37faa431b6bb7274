"""The leader's side of the other ranks: their processes, their connections, and the first reason to give up."""

from __future__ import annotations

import errno
import os
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

from octavo import errors
from octavo.distributed.connection import ALIVE_S, SILENCE_S, Connection, ConnectionEndedError
from octavo.distributed.patience import LEAST_S, MOST_WAITED_S, Patience
from octavo.distributed.rank_messages import Alive, RankFailed, RankMessage
from octavo.distributed.ring import Ring
from octavo.errors import EngineDeadError, OctavoError
from octavo.platform import processes

M = TypeVar("M")

_POLL_S = 0.1
_LOADING_SILENCE_S = 120.0  # a rank that converts a large weight may hold the interpreter
_EXIT_S = 2.0  # for ranks to exit on their own
_STOPPED_S = 1.5  # after which a process of this machine that was stopped counts as gone

_ERROR_TYPES = {
    kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, OctavoError)
}


class RemoteRank:
    """Another rank: what it has sent, and its process if it is a child of this one."""

    def __init__(self, rank: int, connection: Connection, on_end: Callable[[int, str], None]) -> None:
        self.rank = rank
        self.connection = connection
        self.process: subprocess.Popen[bytes] | None = None
        self.inbox: queue.SimpleQueue[RankMessage] = queue.SimpleQueue()
        self._on_end = on_end
        self._stopped_at: float | None = None
        self._alive, self._changed_at = Alive(), 0.0

    def stuck_s(self, now: float, patience: Patience) -> tuple[float, float]:
        """Return the seconds that the rank has computed without progress, and the seconds that it had to wait during
        this time.

        Up to a limit, the first number does not include waits for a disk or a processor. Both are 0 if the rank makes
        progress or computes nothing.
        """
        alive = self.connection.heard
        waited_s = min(alive.waited_s - self._alive.waited_s, MOST_WAITED_S)
        quiet_s = max(now - self._changed_at - waited_s, 0.0)
        if (alive.progress, alive.is_busy) == (self._alive.progress, self._alive.is_busy):
            return (quiet_s, waited_s) if alive.is_busy else (0.0, 0.0)
        if self._alive.is_busy:
            patience.note(max(quiet_s - ALIVE_S, 0.0))
        self._alive, self._changed_at = alive, now
        return 0.0, 0.0

    def stopped_s(self, now: float) -> float:
        """Return the seconds for which the rank's process has been stopped.

        The result is 0 if it runs or is not a child of this process.
        """
        if self.process is None or processes.state_of(self.process.pid) not in ("T", "t"):
            self._stopped_at = None
            return 0.0
        self._stopped_at = now if self._stopped_at is None else self._stopped_at
        return now - self._stopped_at

    def see_again(self, now: float) -> None:
        """Restart the measurement of how long the rank is silent or stopped."""
        self.connection.heard_at = max(self.connection.heard_at, now)
        self._stopped_at = None
        self._alive, self._changed_at = self.connection.heard, now

    def read(self) -> None:
        """Receive messages until the connection ends."""
        try:
            while True:
                self.inbox.put(self.connection.receive())
        except ConnectionEndedError as error:
            self._on_end(self.rank, self._how_it_ended(str(error)))

    def _how_it_ended(self, error: str) -> str:
        if self.process is None:
            return f"its connection has ended: {error}"
        with suppress(subprocess.TimeoutExpired):
            code = self.process.wait(_EXIT_S)
            return f"its process was ended by signal {-code}" if code < 0 else f"its process exited with code {code}"
        return f"its connection has ended: {error}"


class Leader:
    """All other ranks of an engine. `failure` is the first reason to give up. All ranks are then ended."""

    def __init__(self) -> None:
        self.failure: OctavoError | None = None
        self.on_failure: Callable[[str], None] | None = None  # called once, from any thread
        self._ranks: dict[int, RemoteRank] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._silence_s = _LOADING_SILENCE_S
        self._is_watching = False
        self._is_computing = False  # ranks may
        self.patience: Patience | None = None  # with ranks that compute; set before `watch`
        self.progress = 0  # changes as long as a rank computes, and is not stuck

    def spawn(self, ranks: Iterable[int]) -> None:
        """Start processes for these ranks on this machine. Raises EngineDeadError if the system provides none."""
        for rank in ranks:
            started: queue.SimpleQueue[OSError | None] = queue.SimpleQueue()
            # The system ends a child with the thread that started it: this one lives as long as the rank.
            threading.Thread(
                target=self._run_child, args=(rank, started), name=f"octavo-rank-{rank}", daemon=True
            ).start()
            error = started.get()
            if error is not None:
                self.close()
                raise EngineDeadError(f"the process of rank {rank} cannot be started: {error}")

    def admit(self, rank: int, connection: Connection) -> None:
        """Add a rank that has connected over the network."""
        remote = self._add(rank, connection)
        threading.Thread(target=remote.read, name=f"octavo-rank-{rank}", daemon=True).start()

    def watch(self) -> None:
        """Begin to watch the ranks as they compute. Treat a rank that is stuck, or silent for too long, as dead."""
        self._see_again()
        self._silence_s = SILENCE_S
        self._is_computing = True

    def send(self, message: RankMessage, ranks: Iterable[int] | None = None) -> None:
        """Send a message to these ranks, or to all. Raises `failure` if there is one."""
        for rank in self._ranks if ranks is None else ranks:
            # If it has ended, its own thread finds out why.
            with suppress(ConnectionEndedError):
                self._ranks[rank].connection.send(message)
        self.check()

    def receive(self, rank: int, kind: type[M]) -> M:
        """Return the next message of a rank. Raises `failure` if there is one, such as a message of another kind."""
        remote = self._ranks[rank]
        while True:
            try:
                message = remote.inbox.get(timeout=_POLL_S)
            except queue.Empty:
                silence = time.monotonic() - remote.connection.heard_at
                if silence > self._silence_s:
                    self.fail(rank, f"it has died or was stopped: no sign of life for {silence:.1f} s")
                self.check()
                continue
            if isinstance(message, RankFailed):
                self.fail(rank, message.reason, _ERROR_TYPES.get(message.kind, EngineDeadError))
            elif isinstance(message, kind):
                return message
            else:
                self.fail(rank, f"it sent {type(message).__name__} instead of {kind.__name__}")
            self.check()

    def check(self) -> None:
        """Raise `failure` if there is one."""
        if self.failure is not None:
            raise self.failure

    def fail(self, rank: int | None, reason: str, kind: type[OctavoError] = EngineDeadError) -> None:
        """Give up because of a rank, unless the leader has given up before, and end all ranks."""
        with self._lock:
            if self.failure is not None or self._closed.is_set():
                return
            text = reason if rank is None or kind is not EngineDeadError else f"rank {rank} is gone: {reason}"
            self.failure = _made(kind, text)
        if self.on_failure is not None:
            self.on_failure(text)
        self._end()

    def close(self) -> None:
        """End all ranks and wait for their processes. May be called twice."""
        self._closed.set()
        for remote in self._ranks.values():
            remote.connection.close()
        end = time.monotonic() + _EXIT_S
        for remote in self._ranks.values():
            if remote.process is not None:
                with suppress(subprocess.TimeoutExpired):
                    remote.process.wait(max(end - time.monotonic(), 0.01))
        self._end()
        for remote in self._ranks.values():
            if remote.process is not None:
                remote.process.wait()  # it was killed

    def _end(self) -> None:
        for remote in self._ranks.values():
            remote.connection.close()
            if remote.process is not None:
                remote.process.kill()

    def _add(self, rank: int, connection: Connection) -> RemoteRank:
        remote = RemoteRank(rank, connection, self._ended)
        self._ranks = self._ranks | {rank: remote}  # other threads iterate over the ranks
        connection.stay_alive()
        if not self._is_watching:
            self._is_watching = True
            threading.Thread(target=self._watch, name="octavo-ranks", daemon=True).start()
        return remote

    def _ended(self, rank: int, reason: str) -> None:
        remote = self._ranks[rank]
        with suppress(queue.Empty):
            while True:  # it may have sent the reason
                message = remote.inbox.get_nowait()
                if isinstance(message, RankFailed):
                    self.fail(rank, message.reason, _ERROR_TYPES.get(message.kind, EngineDeadError))
        self.fail(rank, reason)

    def _run_child(self, rank: int, started: queue.SimpleQueue[OSError | None]) -> None:
        try:
            ours, theirs = socket.socketpair()
            rings, here, there = _new_rings()
            process = processes.spawn(
                "octavo.engine.ranks.rank_process", theirs, here, there, os.getpid(), descriptors=(*here, *there)
            )
        except OSError as error:
            started.put(error)
            return
        remote = self._add(rank, Connection(ours, rings))
        remote.process = process
        started.put(None)
        remote.read()
        process.wait()

    def _see_again(self) -> None:
        now = time.monotonic()
        for remote in self._ranks.values():
            remote.see_again(now)

    def _watch(self) -> None:
        looked_at = time.monotonic()
        while not self._closed.wait(_POLL_S) and self.failure is None:
            now = time.monotonic()
            if now - looked_at > SILENCE_S / 2:  # this process was stopped (Ctrl-Z), and could not hear
                self._see_again()
            looked_at = now
            for rank, remote in self._ranks.items():
                silence = now - remote.connection.heard_at
                if silence > self._silence_s:
                    self.fail(rank, f"it has died or was stopped: no sign of life for {silence:.1f} s")
                elif (stopped := remote.stopped_s(now)) > _STOPPED_S:
                    self.fail(rank, f"its process has been stopped for {stopped:.1f} s")
                elif self._is_computing and self.patience is not None:
                    self._look_for_progress(rank, now, self.patience)

    def _look_for_progress(self, rank: int, now: float, patience: Patience) -> None:
        remote = self._ranks[rank]
        stuck_s, waited_s = remote.stuck_s(now, patience)
        if not remote.connection.heard.is_busy:
            return
        if stuck_s > LEAST_S and stuck_s > patience.limit_s():
            beside = f", not counting {waited_s:.1f} s of waiting for a disk or a processor" if waited_s else ""
            self.fail(rank, f"it is alive, but has been stuck in a step for {stuck_s:.1f} s{beside}")
        self.progress += 1


def _made(kind: type[OctavoError], text: str) -> OctavoError:
    try:
        return kind(text)
    except TypeError:  # an error with further arguments
        return EngineDeadError(text)


def _new_rings() -> tuple[tuple[Ring, Ring] | None, tuple[int, ...], tuple[int, ...]]:
    """Return the rings to and from a child, and the child's descriptors, outgoing first.

    Return None and no descriptors if the system does not provide shared memory; the socket then carries everything.
    """
    try:
        there, here = Ring.create(), Ring.create()
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        return None, (), ()
    return (Ring(there, is_new=True), Ring(here)), here, there
