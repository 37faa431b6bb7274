"""How the C library keeps memory that requests have given back: settings of a whole process, made by its main."""

from __future__ import annotations

import ctypes

# Of glibc's malloc.h.
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LARGE_BYTES = 1 << 20
_MAX_HEAPS = 4


def return_large_blocks() -> None:
    """From now on, blocks of 1 MiB and more go back to the system as soon as they are free.

    glibc moves its own limit up to 32 MiB with the first large body, and then keeps what such bodies took for ever.
    """
    _set(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def limit_heaps() -> None:
    """All threads that start from now on share a few heaps, however many cores there are.

    glibc makes up to eight a core. What one thread makes and others keep and free, such as each grammar from the
    short-lived thread that compiles it, then lies scattered over all of them, and the holes in one are of no use to
    the others: 600 grammars, of which 108 are kept, leave 19 MiB of holes in 16 heaps, 3 in four and 1 in a single
    one, whose lock the threads that compute masks would wait for.
    """
    _set(_M_ARENA_MAX, _MAX_HEAPS)


def _set(parameter: int, value: int) -> None:
    """Other C libraries have no such call and need none."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(parameter, value)
