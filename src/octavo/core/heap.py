"""Settings of the C library's allocator for a whole process, made by its main function."""

from __future__ import annotations

from octavo.platform.memory import set_allocator

# Of glibc's malloc.h.
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LARGE_BYTES = 1 << 20
_MAX_HEAPS = 4


def return_large_blocks() -> None:
    """Return blocks of 1 MiB and more to the system as soon as they are free.

    glibc raises its own limit up to 32 MiB with the first large body, and then keeps the memory of such bodies forever.
    """
    set_allocator(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def limit_heaps() -> None:
    """Make all threads that start from now on share a few heaps, independent of the number of cores.

    glibc creates up to eight per core. Memory that one thread allocates and others free, such as each grammar of a
    short-lived compiling thread, is then scattered over all heaps, and the holes in one are useless to the others. 600
    grammars, of which 108 are kept, leave 19 MiB of holes in 16 heaps, 3 in four and 1 in a single one; but threads
    that compute masks would wait for the lock of a single one.
    """
    set_allocator(_M_ARENA_MAX, _MAX_HEAPS)
