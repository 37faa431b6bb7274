"""The process of a rank, started by `octavo.distributed.leader` or, on another machine, by `ranks.following`."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1


def main(descriptor: int, outgoing: tuple[int, ...], incoming: tuple[int, ...], parent_pid: int) -> None:
    """Follows the leader until it ends. descriptor: of the connected socket. parent_pid: the leader's.

    outgoing, incoming: the descriptors of two rings (`octavo.distributed.ring`).
    """
    _end_with(parent_pid)
    # These take most of a second, in which the process must already end with its parent.
    from octavo.distributed.connection import Connection
    from octavo.distributed.ring import Ring
    from octavo.engine.ranks.following import Follower

    rings = Ring(outgoing, is_new=True), Ring(incoming)
    Follower(Connection(socket.socket(fileno=descriptor), rings)).run()


def main_over_network(host: str, port: int, rank: int, model: str, parent_pid: int) -> None:
    """Follows a leader on another machine. model: its name on this one. parent_pid: of `octavo serve` here."""
    _end_with(parent_pid)
    # As in `main`.
    from octavo.engine.ranks.following import follow_one

    follow_one(host, port, rank, model)


def _end_with(parent_pid: int) -> None:
    """This process ends when its parent does, and never on the signals of a terminal."""
    # The kernel kills this process with its parent, even if it is stopped or stuck in native code.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the call
        sys.exit(1)
    # The parent decides when this process exits.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
