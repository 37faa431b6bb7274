"""TCP connections: their state, and how long data may remain unacknowledged."""

from __future__ import annotations

import socket
import sys

_CLOSED = 7  # first byte of Linux's struct tcp_info


def is_reset(sock: socket.socket) -> bool:
    """Return True if the other end has reset the connection, and False where the system does not report it."""
    if sys.platform == "linux":
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSED
    return False


def limit_unanswered(sock: socket.socket, milliseconds: int) -> None:
    """End the connection if sent data is not acknowledged in time. Only on Linux. Raises OSError."""
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
