"""Connects ranks on several machines to their leader: a listener, a shared token, and reasons to refuse a rank."""

from __future__ import annotations

import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress

from octavo.distributed.connection import Connection, ConnectionEndedError
from octavo.distributed.rank_messages import Challenge, Hello, RankFailed, hello, problem_with
from octavo.errors import EngineDeadError, UsageError

logger = logging.getLogger(__name__)

HELLO_BYTES = 4096  # the longest message of an unauthenticated peer
_HELLO_S = 5.0  # for the first messages
_RETRY_S = 0.5
_MOST_STRANGERS = 64  # connections that are being greeted at once


def address_of(text: str) -> tuple[str, int]:
    """Parse `HOST:PORT`. Raises UsageError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"master is {text!r}; write the address of the machine with node_rank 0, as HOST:PORT")
    return host.strip("[]"), int(port)


def accept_ranks(
    address: tuple[str, int],
    token: str,
    ranks: Collection[int],
    timeout_s: float,
    listening: Callable[[int], None] | None = None,
    check: Callable[[], None] = lambda: None,
) -> dict[int, Connection]:
    """Return the connections of these ranks once all have connected and proved that they know the token.

    Other connections are refused and logged.
    listening: called with the port once ranks may connect. If the address has port 0, the system chooses the port.
    check: called while waiting; raises if a rank cannot come.
    Raises EngineDeadError naming the missing ranks, and UsageError for an unusable address.
    """
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        listener = socket.create_server(address, family=family, backlog=_MOST_STRANGERS)
    except OSError as error:
        raise UsageError(
            f"master {address[0]}:{address[1]} is not an address of this machine, or is in use: {error}"
        ) from None
    greeted: queue.SimpleQueue[tuple[int, Connection]] = queue.SimpleQueue()
    found: dict[int, Connection] = {}
    with listener:
        door = _Door(listener, token, ranks, greeted)
        threading.Thread(target=door.run, name="octavo-door", daemon=True).start()
        if listening is not None:
            listening(listener.getsockname()[1])
        end = time.monotonic() + timeout_s
        while len(found) < len(ranks):
            try:
                check()
            except BaseException:
                for connection in found.values():
                    connection.close()
                raise
            with suppress(queue.Empty):
                rank, connection = greeted.get(timeout=max(min(end - time.monotonic(), _RETRY_S), 0.01))
                if rank in found:
                    _refuse(connection, f"rank {rank} is already connected")
                else:
                    found[rank] = connection
            if time.monotonic() > end:
                for connection in found.values():
                    connection.close()
                missing = ", ".join(map(str, sorted(set(ranks) - set(found))))
                raise EngineDeadError(
                    f"rank {missing} did not connect to {address[0]}:{address[1]} within {timeout_s:.0f} s: start the "
                    "same command on the other machines with their --node-rank"
                )
    return found


def connect(address: tuple[str, int], token: str, rank: int, timeout_s: float) -> Connection:
    """Return an authenticated connection to the leader. Raises EngineDeadError if no leader can be reached."""
    end = time.monotonic() + timeout_s
    while True:
        found = _attempt(address, token, rank)
        if isinstance(found, Connection):
            return found
        if time.monotonic() > end:
            where = f"{address[0]}:{address[1]}"
            raise EngineDeadError(f"the leader at {where} could not be reached within {timeout_s:.0f} s: {found}")
        time.sleep(_RETRY_S)


def _attempt(address: tuple[str, int], token: str, rank: int) -> Connection | Exception:
    try:
        connection = Connection(socket.create_connection(address, timeout=_HELLO_S))
        challenge = connection.receive(HELLO_BYTES)
        if not isinstance(challenge, Challenge):
            raise ConnectionEndedError("it is not a leader of ranks")
        connection.send(hello(rank, token, challenge.nonce))
        connection.settimeout(None)
    except (OSError, ConnectionEndedError) as error:
        return error
    return connection


class _Door:
    """Authenticates each new connection in its own thread, so that no connection can delay the rest."""

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        ranks: Collection[int],
        greeted: queue.SimpleQueue[tuple[int, Connection]],
    ) -> None:
        self._listener, self._token, self._ranks, self._greeted = listener, token, ranks, greeted
        self._room = threading.BoundedSemaphore(_MOST_STRANGERS)

    def run(self) -> None:
        """Accept connections until the listener is closed."""
        with suppress(OSError):
            while True:
                sock, peer = self._listener.accept()
                if self._room.acquire(blocking=False):
                    threading.Thread(target=self._greet, args=(sock, str(peer[0])), daemon=True).start()
                else:
                    sock.close()

    def _greet(self, sock: socket.socket, peer: str) -> None:
        connection = Connection(sock)
        try:
            connection.settimeout(_HELLO_S)
            challenge = Challenge(secrets.token_bytes(32))
            connection.send(challenge)
            message = connection.receive(HELLO_BYTES)
            if not isinstance(message, Hello):
                raise ConnectionEndedError(f"it sent {type(message).__name__} instead of Hello")
            problem = problem_with(message, self._token, challenge.nonce, self._ranks)
            if problem is not None:
                logger.warning("a rank from %s was refused: %s", peer, problem)
                _refuse(connection, problem)
                return
            connection.settimeout(None)
            self._greeted.put((message.rank, connection))
        except ConnectionEndedError as error:
            logger.warning("a connection from %s is not from a rank: %s", peer, error)
            connection.close()
        finally:
            self._room.release()


def _refuse(connection: Connection, reason: str) -> None:
    with suppress(ConnectionEndedError):
        connection.send(RankFailed("UsageError", f"the leader refused this rank: {reason}"))
    connection.close()
