"""The server's side of one engine: its process or thread, the connection to it, and its exit."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from octavo.config import EngineConfig
from octavo.core.wire import (
    MAX_MESSAGE_BYTES,
    SIZE_BYTES,
    EngineMessage,
    Log,
    MalformedMessageError,
    Start,
    decode,
    encode,
    frame,
    frame_size,
)
from octavo.errors import EngineDeadError
from octavo.platform import processes

logger = logging.getLogger(__name__)

_DUMP_S = 0.2  # for the stacks to be written before the process is killed
_POLL_S = 0.005  # between two looks at a process that is about to exit
_KILL_GRACE_S = 5.0


class EngineProcess:
    """One engine, from its start to its exit. Belongs to the event loop in which it is created."""

    def __init__(
        self,
        config: EngineConfig,
        on_message: Callable[[EngineMessage], None],
        on_exit: Callable[[str], None],
        *,
        in_thread: bool,
    ) -> None:
        """Start the process.

        on_message: called with every message except log messages.
        on_exit: called once with the reason.
        in_thread: run on a thread instead of in a process.
        Raises EngineDeadError if the system provides no process or socket.
        """
        self._on_message = on_message
        self._on_exit = on_exit
        self._writer: asyncio.StreamWriter | None = None
        self._engine: subprocess.Popen[bytes] | _EngineThread
        try:
            self._socket, theirs = socket.socketpair()
        except OSError as error:
            raise EngineDeadError(f"the engine's process cannot be started: {error}") from error
        try:
            self._engine = (
                _EngineThread(theirs) if in_thread else processes.spawn("octavo.core.main", theirs, os.getpid())
            )
        except (OSError, RuntimeError) as error:  # no thread is a RuntimeError
            self._socket.close()
            theirs.close()
            raise EngineDeadError(f"the engine's process cannot be started: {error}") from error
        self.pid = self._engine.pid
        start = Start(config, logging.getLogger("octavo").getEffectiveLevel(), time.monotonic())
        self._ended = asyncio.get_running_loop().create_task(self._serve(start))

    def send(self, data: bytes) -> bool:
        """Send an encoded message. Return False if the engine has too many unread messages or has exited."""
        writer = self._writer
        if writer is None or writer.is_closing() or writer.transport.get_write_buffer_size() > MAX_MESSAGE_BYTES:
            return False
        writer.write(frame(data))
        return True

    async def kill_stalled(self) -> None:
        """Kill the engine, but first let it write its threads' stacks to standard error if it still can."""
        if isinstance(self._engine, subprocess.Popen):
            processes.request_stacks(self._engine)
        await asyncio.sleep(_DUMP_S)
        self.kill()

    def kill(self) -> None:
        """Kill a process at once. An engine thread ends when it next reads or sends."""
        with suppress(OSError):  # it is another user's now: it ends with its connection
            self._engine.kill()
        with suppress(OSError):  # the connection has ended
            self._socket.shutdown(socket.SHUT_RDWR)

    async def close(self) -> None:
        """Kill the engine and wait until it has gone completely. Killing a process is safe, because it holds nothing
        that must be saved.
        """
        self.kill()
        await asyncio.wait({self._ended}, timeout=_KILL_GRACE_S)

    async def _serve(self, start: Start) -> None:
        """Receive the engine's messages until it ends."""
        reason = None
        try:
            reader, self._writer = await asyncio.open_connection(sock=self._socket)
            self.send(encode(start))
            while True:
                size = frame_size(await reader.readexactly(SIZE_BYTES))
                message = decode(await reader.readexactly(size))
                if isinstance(message, Log):
                    logging.getLogger(message.name).log(message.level, "%s", message.text)
                else:
                    self._on_message(message)
        except MalformedMessageError as error:
            reason = f"the engine's process sent no message: {error}"
        except (asyncio.IncompleteReadError, OSError):
            pass  # it has ended
        finally:
            self.kill()
            if self._writer is not None:
                self._writer.transport.abort()
            while (code := self._engine.poll()) is None:
                await asyncio.sleep(_POLL_S)
            self._on_exit(reason or _how_it_ended(code))


class _EngineThread(threading.Thread):
    """An engine in this process, with as much of `subprocess.Popen`'s interface as possible."""

    def __init__(self, sock: socket.socket) -> None:
        from octavo.core.service import EngineService  # only in the engine's process, if it has one

        super().__init__(name="octavo-service", daemon=True)
        self.pid = os.getpid()
        self.service = EngineService(sock, owns_process=False)
        self.start()

    def run(self) -> None:
        self.service.run()

    def poll(self) -> int | None:
        return None if self.is_alive() else 0

    def kill(self) -> None:
        """Do nothing: the thread ends with its connection."""


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"the engine's process exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"the engine's process was ended by {name}"
