"""Settings for the C library's allocator. They affect the whole process and are made by its main function."""

from __future__ import annotations

from octavo.platform.memory import set_allocator

# Of glibc's malloc.h.
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LARGE_BYTES = 1 << 20
_MAX_HEAPS = 4


def return_large_blocks() -> None:
    """Return blocks of 1 MiB and more to the system as soon as they are free.

    After the first large body, glibc would raise its own limit to up to 32 MiB and keep the memory of such bodies
    forever.
    """
    set_allocator(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def limit_heaps() -> None:
    """Make all threads that start from now on share a few heaps, regardless of the number of cores.

    glibc creates up to eight heaps per core. Memory that one thread allocates and others free, such as a grammar
    compiled by a short-lived thread, is then scattered over all heaps, and other heaps cannot use the holes in one.
    After 600 grammars had been compiled and 108 of them kept, the holes took 19 MiB with 16 heaps, 3 MiB with four and
    1 MiB with one. With a single heap, however, threads that compute masks would wait for its lock.
    """
    set_allocator(_M_ARENA_MAX, _MAX_HEAPS)
