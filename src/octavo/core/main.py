"""The engine's process, started by `engine_process`."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

from octavo.core.heap import limit_heaps

# When memory runs out, the system shall take this process, which is restarted, and not the server's.
_OOM_SCORE = 500
_PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent_pid: int) -> None:
    """Serves one engine until the server ends it. descriptor: of the connected socket. parent_pid: the server's."""
    # The kernel kills this process with the server, even if it is stopped or stuck in native code.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the call
        sys.exit(1)
    # A terminal and a service manager signal every process of a group. The server decides when this one exits.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    limit_heaps()  # before there are other threads
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
    from octavo.core.service import EngineService  # takes most of a second

    EngineService(socket.socket(fileno=descriptor), owns_process=True).run()
