"""How the C library keeps memory that requests have given back: settings of a whole process, made by its main."""

from __future__ import annotations

import ctypes

# Of glibc's malloc.h.
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LARGE_BYTES = 1 << 20


def return_large_blocks() -> None:
    """From now on, blocks of 1 MiB and more go back to the system as soon as they are free.

    glibc moves its own limit up to 32 MiB with the first large body, and then keeps what such bodies took for ever.
    """
    _set(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def share_one_heap() -> None:
    """All threads that start from now on share one heap.

    glibc gives threads up to eight heaps a core. What is made on one thread and kept on, such as each grammar on the
    short-lived thread that compiles it, then lies scattered over all of them, and the holes in one heap are of no use
    to the others: at a level number of bytes in use, resident memory grew by megabytes a minute.
    """
    _set(_M_ARENA_MAX, 1)


def _set(parameter: int, value: int) -> None:
    """Other C libraries have no such call and need none."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(parameter, value)
