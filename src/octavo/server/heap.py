"""How the C library keeps memory that requests have given back."""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
_LARGE_BYTES = 1 << 20


def return_large_blocks() -> None:
    """From now on, blocks of 1 MiB and more go back to the system as soon as they are free.

    glibc moves its own limit up to 32 MiB with the first large body, and then keeps what such bodies took for ever.
    Other C libraries have no such call and need none.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
