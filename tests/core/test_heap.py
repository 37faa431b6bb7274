"""The threads of the engine's process share a few heaps."""

from __future__ import annotations

import subprocess
import sys

# Prints the number of heaps before and after twenty threads have asked for memory at the same time.
COUNT_HEAPS = """
import ctypes, os, sys, threading

def heaps():
    read, write = os.pipe()
    stream = libc.fdopen(write, b"w")
    libc.malloc_info(0, ctypes.c_void_p(stream))
    libc.fclose(ctypes.c_void_p(stream))
    return os.read(read, 1 << 16).count(b"<heap nr=")

libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
libc.malloc.restype = ctypes.c_void_p
before = heaps()
together = threading.Barrier(20)

def take():
    together.wait()
    libc.malloc(5000)
    together.wait()

threads = [threading.Thread(target=take) for _ in range(20)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(before, heaps())
"""


def count_heaps(first: str) -> list[int]:
    """The output of COUNT_HEAPS in a process. first: code that the process runs before it."""
    process = subprocess.run(
        [sys.executable, "-c", first + COUNT_HEAPS],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return [int(number) for number in process.stdout.split()]


def test_threads_of_the_engine_s_process_share_few_heaps() -> None:
    # Its service ends at once, because the other end of its connection is closed.
    serve = """
import os, socket
from octavo.core.main import main
ours, theirs = socket.socketpair()
ours.close()
main(theirs.detach(), os.getppid())
"""
    before, after = count_heaps(serve)
    assert before == 1
    assert 1 < after <= 4
