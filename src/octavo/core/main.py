"""The engine's process, started by `engine_process` with orders on its standard input."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import shutil
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

from octavo.core.heap import limit_heaps

# When memory runs out, the system shall take this process, which is restarted, and not the server's.
_OOM_SCORE = 500
_PR_SET_PDEATHSIG = 1
_EXIT_ORPHANED = 1


def main() -> int:
    """Serves one engine until the server closes it or exits. Returns the exit code."""
    # A terminal and a service manager signal every process of a group. The server decides when this one exits.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    limit_heaps()  # before there are other threads
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return _EXIT_ORPHANED
    directory = Path(json.loads(line)["directory"])
    threading.Thread(target=_end_with_server, args=(directory,), name="octavo-lifeline", daemon=True).start()
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
    return _serve(line, directory)


def _serve(line: bytes, directory: Path) -> int:
    # Imported only now, because it takes most of a second, in which the exit of the server would go unnoticed.
    import logging

    import msgspec
    import zmq

    from octavo import env
    from octavo.core.faults import Faults
    from octavo.core.messages import FROM_ENGINE, MAX_MESSAGE_BYTES, TO_ENGINE, Log, StartOrder
    from octavo.core.outbox import LogToServer, Outbox
    from octavo.core.service import EngineService

    order = msgspec.json.decode(line, type=StartOrder)
    outbox = Outbox(f"ipc://{directory / FROM_ENGINE}")
    logging.basicConfig(level=order.log_level, format="%(message)s", handlers=[LogToServer(outbox)])
    inbox = zmq.Context().socket(zmq.PULL)
    inbox.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    inbox.setsockopt(zmq.LINGER, 0)
    inbox.connect(f"ipc://{directory / TO_ENGINE}")
    outbox.send(Log(logging.DEBUG, __name__, f"process {os.getpid()} has begun"))  # the server answers with Hello

    def connected() -> None:
        # From here on nothing is left behind, however the two processes end.
        shutil.rmtree(directory, ignore_errors=True)
        _die_with(order.parent_pid)

    EngineService(order, inbox, outbox, Faults.parse(env.fault()), connected).run()
    inbox.close()
    outbox.close()
    return 0


def _end_with_server(directory: Path) -> None:
    """Waits for the end of standard input, which the server keeps open as long as it lives."""
    while os.read(0, 4096):
        pass
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(_EXIT_ORPHANED)


def _die_with(parent_pid: int) -> None:
    """Makes the kernel kill this process with the server, even if it is stopped or stuck in native code."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the call
        os._exit(_EXIT_ORPHANED)
