"""Connections over TCP: their state, and the time that data may stay unanswered."""

from __future__ import annotations

import socket
import sys

_CLOSED = 7  # first byte of Linux's struct tcp_info


def is_reset(sock: socket.socket) -> bool:
    """True if the other end has reset the connection; False where the system does not say."""
    if sys.platform == "linux":
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSED
    return False


def limit_unanswered(sock: socket.socket, milliseconds: int) -> None:
    """End the connection if sent data is not acknowledged in time. Only on Linux. Raises OSError."""
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
