"""The server's end of one engine process: its start, sockets, messages and exit."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from octavo.config import EngineConfig
from octavo.core.messages import (
    FROM_ENGINE,
    MAX_MESSAGE_BYTES,
    TO_ENGINE,
    Close,
    FromEngine,
    Hello,
    Log,
    MalformedMessageError,
    StartOrder,
    ToEngine,
    decode_from_engine,
    encode,
)
from octavo.errors import EngineDeadError

logger = logging.getLogger(__name__)

_CLOSE_GRACE_S = 2.0
_KILL_GRACE_S = 5.0
_MAX_SOCKET_PATH = 100  # the system's limit is 107 bytes
_MESSAGES_AT_ONCE = 64  # read before other work of the event loop has its turn
_DUMP_S = 0.2  # for the stacks to be written before the process is killed


class EngineProcess:
    """One process, from its start to its exit. Belongs to the event loop in which it is created."""

    def __init__(
        self,
        config: EngineConfig,
        context: zmq.Context[zmq.Socket[bytes]],
        on_message: Callable[[FromEngine], None],
        on_exit: Callable[[str], None],
    ) -> None:
        """Spawns it. context: outlives it; one for all processes of an engine, because ZeroMQ starts threads with the
        first socket and aborts if it cannot. on_message: called with all messages except the log. on_exit: called once
        with the reason of the exit.

        Raises EngineDeadError, and leaves nothing behind, if the system provides no process, thread, socket or
        directory.
        """
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_exit = on_exit
        self._is_connected = False
        self._exited = asyncio.Event()
        self.num_malformed = 0
        self._context = context
        self._sockets: list[zmq.Socket[bytes]] = []
        self._directory: Path | None = None
        try:
            self._directory = _private_directory()
            self._outbox = self._bind(self._directory / TO_ENGINE, zmq.PUSH)
            self._inbox = self._bind(self._directory / FROM_ENGINE, zmq.PULL)
            # In the loop's own thread: the system would end the process with the thread that spawned it.
            # In a session of its own: Ctrl-C at a terminal is meant for the server.
            self._process = subprocess.Popen(
                [sys.executable, "-c", _command()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        except (OSError, zmq.ZMQError) as error:
            self._free()
            raise EngineDeadError(f"the engine's process cannot be started: {error}") from error
        self.pid = self._process.pid
        try:
            self._give_order(config)
            self._loop.add_reader(self._inbox.FD, self._read)
            # Last, because it calls `on_exit`, which must not happen for a process that failed to start.
            threading.Thread(target=self._wait, name="octavo-engine-exit", daemon=True).start()
        except (OSError, RuntimeError) as error:  # no thread is a RuntimeError
            self.kill()
            self._process.wait()
            self._release()
            raise EngineDeadError(f"the engine's process cannot be watched: {error}") from error

    def send(self, data: bytes) -> bool:
        """Sends an encoded message. False: the process accepts none."""
        try:
            self._outbox.send(data, zmq.NOBLOCK)
        except zmq.ZMQError:  # it left too many unread, or is gone
            return False
        return True

    def tell(self, message: ToEngine) -> bool:
        """Sends a message; see `send`."""
        return self.send(encode(message))

    async def kill_stalled(self) -> None:
        """Kills it after it has written its threads' stacks to standard error, if it still can."""
        self._signal(signal.SIGUSR1)
        await asyncio.sleep(_DUMP_S)
        self._signal(signal.SIGKILL)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    async def close(self) -> None:
        """Asks it to exit, kills it if it does not, and leaves nothing behind."""
        if self.tell(Close()):
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._exited.wait(), _CLOSE_GRACE_S)
        if not self._exited.is_set():
            self.kill()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._exited.wait(), _KILL_GRACE_S)
        self._release()

    def _bind(self, path: Path, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(f"ipc://{path}")
        return socket

    def _give_order(self, config: EngineConfig) -> None:
        order = StartOrder(
            directory=str(self._directory),
            parent_pid=os.getpid(),
            config=dataclasses.asdict(config),
            log_level=logging.getLogger("octavo").getEffectiveLevel(),
            spawned_at=time.monotonic(),
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it is dead already, which `_wait` will find
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            self._process.stdin.flush()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    # --- its messages ---

    def _read(self) -> None:
        # The descriptor reports changes only, so all that is there must be read; in turns with other work, as an
        # engine may say things faster than they are taken in.
        if self._read_some():
            self._loop.call_soon(self._read)

    def _read_some(self) -> bool:
        """Reads its messages. True: there may be more."""
        for _ in range(_MESSAGES_AT_ONCE):
            if self._inbox.closed:
                return False
            try:
                data = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return False
            try:
                message = decode_from_engine(data)
            except MalformedMessageError as error:
                self.num_malformed += 1
                logger.warning("a malformed message of the engine was dropped: %.200s", error)
                continue
            if not self._is_connected:
                self._is_connected = self.tell(Hello())
            if isinstance(message, Log):
                logging.getLogger(message.name).log(message.level, "%s", message.text)
            else:
                self._on_message(message)
        return True

    # --- its end ---

    def _wait(self) -> None:
        self._process.wait()
        with suppress(RuntimeError):  # the loop has ended before the process
            self._loop.call_soon_threadsafe(self._note_exit)

    def _note_exit(self) -> None:
        self._exited.set()
        self._release()
        self._on_exit(_how_it_ended(self._process.returncode))

    def _release(self) -> None:
        """Releases all of its system resources. May be called twice."""
        if not self._inbox.closed:
            while self._read_some():  # it is dead and says no more
                pass
            self._loop.remove_reader(self._inbox.FD)
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        self._free()

    def _free(self) -> None:
        for socket in self._sockets:
            socket.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


def _command() -> str:
    """Runs `octavo.core.main` with the modules that this process has.

    With `-m` the working directory would come first in the path, so that a file there could replace any module.
    """
    return f"import sys; sys.path[:] = {sys.path!r}; from octavo.core.main import main; sys.exit(main())"


def _private_directory() -> Path:
    """A new directory with a random name that only this user can access."""
    directory = Path(tempfile.mkdtemp(prefix="octavo-"))
    if len(os.fsencode(directory / FROM_ENGINE)) > _MAX_SOCKET_PATH:
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix="octavo-", dir="/tmp"))
    return directory


def _how_it_ended(returncode: int) -> str:
    if returncode >= 0:
        return f"the engine's process exited with code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    return f"the engine's process was ended by {name}"
