"""Processes: children that end with their parent, information about other processes, and signals."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

_PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5
_OOM_SCORE = 500
_GONE = frozenset("ZX ")  # states of a process that has exited, as `state_of` gives them


def spawn(
    module: str, sock: socket.socket, *arguments: object, descriptors: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a process that calls `main(descriptor of the socket, *arguments)` of a module.

    The socket is closed in this process. The child uses the same module paths as this process. With `-m` alone the
    working directory would come first in the path, so that a file there could replace any module. The child runs in its
    own session, because Ctrl-C at a terminal is meant for the parent.

    descriptors: additional descriptors that the child inherits under the same numbers; none on Windows.
    """
    on_windows = sys.platform == "win32"
    where = "received_socket()" if on_windows else str(sock.fileno())
    own = "; from octavo.platform.processes import received_socket" if on_windows else ""
    call = f"main({', '.join([where, *map(repr, arguments)])})"
    code = f"import sys; sys.path[:] = {sys.path!r}; from {module} import main{own}; {call}"
    with sock:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE if on_windows else subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=() if on_windows else [sock.fileno(), *descriptors],
            start_new_session=True,
        )
        if sys.platform == "win32" and process.stdin is not None:
            with process.stdin as stdin:
                stdin.write(sock.share(process.pid))
    return process


def received_socket() -> int:
    """In a child on Windows, return the descriptor of the socket that its parent shares over standard input."""
    if sys.platform == "win32":
        return socket.fromshare(sys.stdin.buffer.read()).detach()
    raise RuntimeError("children inherit descriptors on this system")


def end_with(parent_pid: int) -> None:
    """Make this process end when its parent does, and ignore the signals of a terminal. Call it once, at startup.

    A terminal and a service manager signal every process of a group; the parent decides when this one exits.
    """
    _die_with(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _die_with(parent_pid: int) -> None:
    if sys.platform == "linux":
        # The kernel kills this process with its parent, even if it is stopped or stuck in native code.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # it died before the call
            sys.exit(1)
    else:
        threading.Thread(target=_watch, args=(parent_pid,), name="octavo-parent", daemon=True).start()


def _watch(parent_pid: int) -> None:
    """Wait until the parent has ended, then end this process.

    Used on systems without a call that does this. Native code that holds the interpreter delays it.
    """
    if sys.platform == "win32":
        synchronize, forever = 0x00100000, 0xFFFFFFFF
        kernel = ctypes.windll.kernel32
        kernel.OpenProcess.restype = ctypes.c_void_p
        handle = kernel.OpenProcess(synchronize, False, parent_pid)
        if handle:
            kernel.WaitForSingleObject(ctypes.c_void_p(handle), forever)
    else:
        while os.getppid() == parent_pid:
            time.sleep(_POLL_S)
    os._exit(1)


def prefer_for_oom() -> None:
    """Ask the system to kill this process first when memory runs out, because it will be restarted. Only on Linux."""
    with suppress(OSError):
        (_PROC / "self" / "oom_score_adj").write_text(str(_OOM_SCORE))


def show_stacks_on_request() -> None:
    """Print the stacks of all threads to standard error after a crash, and whenever `request_stacks` asks for them."""
    faulthandler.enable()
    if sys.platform != "win32":
        faulthandler.register(signal.SIGUSR1, all_threads=True)


def request_stacks(process: subprocess.Popen[bytes]) -> None:
    """Ask a child for its stacks. Does nothing on Windows, which has no signal for it."""
    if sys.platform != "win32":
        process.send_signal(signal.SIGUSR1)


def kill_group(pid: int) -> None:
    """Kill a process that was started in its own session, and everything it has started.

    On Windows, kill only the process.

    Raises ProcessLookupError if there is no such process.
    """
    if sys.platform == "win32":
        try:
            os.kill(pid, signal.SIGTERM)
        except OSError as error:
            raise ProcessLookupError(error.errno, error.strerror) from error
    else:
        os.killpg(pid, signal.SIGKILL)


def state_of(pid: int) -> str:
    """Return the process's state as a letter of proc(5): T is stopped, Z a zombie.

    A blank means that there is no such process, and `?` means that the state is unknown.
    """
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return " " if _has_proc() or not _exists(pid) else "?"


def has_exited(pid: int) -> bool:
    """Return True if the process has exited.

    Where the system can tell, this includes a process whose exit status has not been collected yet.
    """
    return state_of(pid) in _GONE


def start_of(pid: int) -> int | None:
    """Return when a process began, in clock ticks.

    Returns None if it does not exist or is a zombie, and 0 if the system does not report it.
    """
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None if _has_proc() or not _exists(pid) else 0
    state, *fields = stat.rpartition(b")")[2].split()  # the name in parentheses may hold anything
    return None if state in (b"Z", b"X") else int(fields[18])


def resident_bytes(pid: int) -> int:
    """Return the physical memory of a process, or 0 if it is gone or unknown."""
    try:
        pages = int((_PROC / str(pid) / "statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * mmap.PAGESIZE


def threads_of(pid: int | str) -> list[str]:
    """Return the names of the process's thread folders, for `thread_file`. Raises OSError where the system has none."""
    return os.listdir(_PROC / str(pid) / "task")


def thread_file(pid: int | str, thread: str, name: str) -> bytes:
    """Read the beginning of a file about a thread, such as `stat` or `schedstat`. Raises OSError."""
    with open(_PROC / str(pid) / "task" / thread / name, "rb", buffering=0) as file:
        return file.read(1024)


def _has_proc() -> bool:
    return (_PROC / "self" / "stat").exists()


def _exists(pid: int) -> bool:
    """Return True if the process exists or has exited without its parent having collected the exit status."""
    if sys.platform == "win32":
        limited_information = 0x1000
        handle = ctypes.windll.kernel32.OpenProcess(limited_information, False, pid)
        if handle:
            ctypes.windll.kernel32.CloseHandle(handle)
        return bool(handle)
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True  # another user's
    except OSError:
        return False
    return True


def on_signal(loop: asyncio.AbstractEventLoop, number: signal.Signals, call: Callable[[signal.Signals], None]) -> None:
    """From now on, call this function in the loop for each signal with this number."""
    if sys.platform == "win32":
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(call, number) and None)
    else:
        loop.add_signal_handler(number, call, number)


def off_signal(loop: asyncio.AbstractEventLoop, number: signal.Signals) -> None:
    """Undo `on_signal`."""
    if sys.platform == "win32":
        signal.signal(number, signal.SIG_DFL)
    else:
        loop.remove_signal_handler(number)
