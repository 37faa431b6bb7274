"""A connection between two ranks: whole messages in both directions, with keep-alive messages.

Between machines everything passes over a socket. Between processes on one machine, messages pass through shared memory
(`octavo.distributed.ring`); the socket carries the keep-alive messages and shows when the other process is gone.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from octavo.distributed.rank_messages import (
    MAX_MESSAGE_BYTES,
    SIZE_BYTES,
    Alive,
    MalformedRankMessageError,
    RankMessage,
    decode,
    encode,
)
from octavo.distributed.ring import Ring, RingEndedError
from octavo.platform import shared_memory
from octavo.platform.sockets import limit_unanswered

ALIVE_S = 0.5  # between two keep-alives
SILENCE_S = 3.0  # after which a rank counts as dead or stopped
_UNANSWERED_MS = 20_000  # after which a machine that acknowledges nothing counts as gone


class ConnectionEndedError(Exception):
    """The other rank is gone. Never leaves this package and the ranks."""


class Connection:
    """One end of a connection. Any thread may send; only one receives."""

    def __init__(self, sock: socket.socket, rings: tuple[Ring, Ring] | None = None) -> None:
        """rings: the rings to and from the other end, if both ends are on one machine."""
        self._socket = sock
        self._rings = rings
        self._sending = threading.Lock()
        self._writing = threading.Lock()  # to the ring, which may be full while keep-alives continue
        self._closed = threading.Event()
        self._end: float | None = None
        self.heard_at = time.monotonic()
        self.heard = Alive()  # the last keep-alive
        with suppress(OSError):  # a local one has no such options
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            limit_unanswered(sock, _UNANSWERED_MS)

    def send(self, message: RankMessage) -> None:
        """Send a message. Raises ConnectionEndedError if the other end is gone."""
        data = encode(message)
        framed = len(data).to_bytes(SIZE_BYTES, "little") + data
        try:
            if self._rings is not None and not isinstance(message, Alive):
                with self._writing:
                    self._rings[0].write(framed, self._socket.fileno())
                return
            with self._sending:
                self._socket.sendall(framed)
        except (OSError, RingEndedError) as error:
            raise ConnectionEndedError(str(error)) from None

    def receive(self, limit: int = MAX_MESSAGE_BYTES) -> RankMessage:
        """Return the next message that is not a keep-alive, of at most `limit` bytes.

        Raises ConnectionEndedError if the connection has ended, and after bytes that are not a message.
        """
        while True:
            try:
                read = self._read if self._rings is None else self._ready()
                size = int.from_bytes(read(SIZE_BYTES), "little")
                if size > limit:
                    raise ConnectionEndedError(f"a message of {size} bytes, more than {limit}")
                message = decode(read(size))
            except MalformedRankMessageError as error:
                raise ConnectionEndedError(f"it sent no message: {error}") from None
            except (OSError, RingEndedError) as error:
                raise ConnectionEndedError(str(error)) from None
            self.heard_at = time.monotonic()
            if not isinstance(message, Alive):
                return message
            self.heard = message

    def stay_alive(self, state: Callable[[], Alive] = Alive) -> None:
        """Start a thread that sends keep-alive messages until the connection ends."""
        threading.Thread(target=self._beat, args=(state,), name="octavo-alive", daemon=True).start()

    def settimeout(self, seconds: float | None) -> None:
        """Limit the total time of all further reads, and the time of each write. None means no limit."""
        self._end = None if seconds is None else time.monotonic() + seconds
        self._socket.settimeout(seconds)

    def close(self) -> None:
        """Close both directions at once. May be called twice."""
        self._closed.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _beat(self, state: Callable[[], Alive]) -> None:
        with suppress(ConnectionEndedError):
            while not self._closed.wait(ALIVE_S):
                self.send(state())

    def _ready(self) -> Callable[[int], bytes]:
        """Wait for the next message.

        Return the function that reads it, from the ring if the ring has a message, otherwise from the socket.
        """
        assert self._rings is not None
        incoming = self._rings[1]
        while not incoming.has_bytes():
            descriptor = self._socket.fileno()
            if descriptor < 0:
                raise ConnectionEndedError("it was closed")
            if not shared_memory.wait_for_either(incoming.written_fd, descriptor, for_end=False):
                # It may have written before its end.
                return self._read_from_ring if incoming.has_bytes() else self._read
        return self._read_from_ring

    def _read_from_ring(self, count: int) -> bytes:
        assert self._rings is not None
        data = bytearray(count)
        self._rings[1].read_into(memoryview(data), self._socket.fileno())
        return bytes(data)

    def _read(self, count: int) -> bytes:
        data = bytearray(count)
        view, at = memoryview(data), 0
        while at < count:
            if self._end is not None:
                self._socket.settimeout(max(self._end - time.monotonic(), 0.001))
            read = self._socket.recv_into(view[at:])
            if read == 0:
                raise ConnectionEndedError("it has ended")
            at += read
            self.heard_at = time.monotonic()  # a large message takes a while and delays keep-alives
        return bytes(data)
