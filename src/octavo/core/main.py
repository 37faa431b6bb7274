"""The main function of the engine's process, started by `engine_process`."""

from __future__ import annotations

import socket

from octavo.core.heap import limit_heaps
from octavo.platform import processes


def main(descriptor: int, parent_pid: int) -> None:
    """Serve one engine until the server ends it.

    descriptor: the connected socket.
    parent_pid: the server's process id.
    """
    processes.end_with(parent_pid)
    limit_heaps()  # before there are other threads
    processes.show_stacks_on_request()
    processes.prefer_for_oom()
    from octavo.core.service import EngineService  # takes most of a second

    EngineService(socket.socket(fileno=descriptor), owns_process=True).run()
