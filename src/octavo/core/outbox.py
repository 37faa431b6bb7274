"""The outgoing queue of the engine's process, for all of its threads."""

from __future__ import annotations

import logging
import threading

import zmq

from octavo.core.messages import FromEngine, Log, encode

# Messages that wait for a server that does not read, before the engine waits too.
_MAX_UNSENT = 1000
_FLUSH_MS = 1000


class Outbox:
    """Sends messages to the server in the order of the calls. Thread-safe."""

    def __init__(self, address: str) -> None:
        self._lock = threading.Lock()
        # A context of its own, so that it can be flushed and ended whatever the inbox's thread does.
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, _MAX_UNSENT)
        self._socket.setsockopt(zmq.LINGER, _FLUSH_MS)
        self._socket.connect(address)
        self._is_closed = False

    def send(self, message: FromEngine) -> None:
        """Sends a message; waits while the server has too much unread. Does nothing once closed."""
        data = encode(message)
        with self._lock:
            if not self._is_closed:
                self._socket.send(data)

    def close(self) -> None:
        """Waits briefly until everything is sent. May be called twice."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._socket.close()
                self._context.term()


class LogToServer(logging.Handler):
    """A log handler that sends records to the server, which writes the log of both processes in its own format."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__()
        self._outbox = outbox

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._outbox.send(Log(record.levelno, record.name, self.format(record)))
        except Exception:
            self.handleError(record)
