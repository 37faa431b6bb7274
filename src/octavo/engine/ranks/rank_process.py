"""The process of a rank, started by `octavo.distributed.leader` or, on another machine, by `ranks.following`."""

from __future__ import annotations

import faulthandler
import socket

from octavo.platform import processes


def main(descriptor: int, outgoing: tuple[int, ...], incoming: tuple[int, ...], parent_pid: int) -> None:
    """Follow the leader until it ends.

    descriptor: the connected socket.
    parent_pid: the leader's process id.
    outgoing, incoming: descriptors of two rings (`octavo.distributed.ring`), or empty if the socket carries everything.
    """
    processes.end_with(parent_pid)
    faulthandler.enable()
    # These imports take most of a second; the process must already end with its parent then.
    from octavo.distributed.connection import Connection
    from octavo.distributed.ring import Ring
    from octavo.engine.ranks.following import Follower

    rings = (Ring(outgoing, is_new=True), Ring(incoming)) if outgoing else None
    Follower(Connection(socket.socket(fileno=descriptor), rings)).run()


def main_over_network(host: str, port: int, rank: int, model: str, parent_pid: int) -> None:
    """Follow a leader on another machine.

    model: the model's name on this machine.
    parent_pid: process id of `octavo serve` here.
    """
    processes.end_with(parent_pid)
    faulthandler.enable()
    # See `main`.
    from octavo.engine.ranks.following import follow_one

    follow_one(host, port, rank, model)
