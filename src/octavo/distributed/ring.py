"""A byte pipe through memory shared by two processes on one machine: a ring buffer with one writer and one reader.

The memory and two counters are file descriptors that a child inherits, so there are no names that could be left behind.
One counter is for bytes written but not yet seen by the reader, one for bytes read but not yet seen by the writer. A
process sleeps in the kernel until a counter is above zero. Everything the other process wrote before it incremented the
counter is then visible on every processor.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress

from octavo.platform import shared_memory

RING_BYTES = 1 << 20  # per direction; longer messages pass in parts


class RingEndedError(Exception):
    """The other process is gone. Never leaves this package."""


class Ring:
    """One end of a ring. It has descriptors for the memory, the bytes written and the bytes read (see `create`)."""

    def __init__(self, descriptors: Sequence[int], *, is_new: bool = False) -> None:
        """Take over the descriptors.

        is_new: this end writes, and all of the memory is free.
        """
        self._memory_fd, self._written_fd, self._read_fd = descriptors
        self._memory = mmap.mmap(self._memory_fd, 0)
        self._size = len(self._memory)
        self._at = 0
        self._count = self._size if is_new else 0  # bytes that this end may write or read

    @classmethod
    def create(cls, size: int = RING_BYTES) -> tuple[int, int, int]:
        """Create an empty ring of `size` bytes and return its descriptors.

        Raises OSError if the system provides none.
        """
        made: list[int] = []
        try:
            made.append(shared_memory.new_memory(size))
            made.append(shared_memory.new_counter())
            made.append(shared_memory.new_counter())
        except OSError:
            for descriptor in made:
                os.close(descriptor)
            raise
        return made[0], made[1], made[2]

    @property
    def written_fd(self) -> int:
        """A descriptor that becomes readable when the other end has written."""
        return self._written_fd

    def write(self, data: bytes | bytearray | memoryview, ended_fd: int) -> None:
        """Write the data. Wait while the ring is full.

        ended_fd: hangs up when the other end is gone, which raises RingEndedError.
        """
        view = memoryview(data).cast("B")
        while view:
            count = min(self._available(self._read_fd, ended_fd), len(view))
            first = min(count, self._size - self._at)
            self._memory[self._at : self._at + first] = view[:first]
            self._memory[: count - first] = view[first:count]
            self._pass(count, self._written_fd)
            view = view[count:]

    def read_into(self, view: memoryview, ended_fd: int) -> None:
        """Fill the view, waiting for missing bytes. See `write`. Bytes written before the end can still be read."""
        while view:
            count = min(self._available(self._written_fd, ended_fd), len(view))
            first = min(count, self._size - self._at)
            view[:first] = self._memory[self._at : self._at + first]
            view[first:count] = self._memory[: count - first]
            self._pass(count, self._read_fd)
            view = view[count:]

    def has_bytes(self) -> bool:
        """True if the other end has written bytes that have not been read yet."""
        if self._count == 0:
            self._count = shared_memory.taken_from(self._written_fd)
        return self._count > 0

    def __del__(self) -> None:
        for descriptor in (self._memory_fd, self._written_fd, self._read_fd):
            with suppress(OSError):
                os.close(descriptor)

    def _pass(self, count: int, counter_fd: int) -> None:
        self._at = (self._at + count) % self._size
        self._count -= count
        shared_memory.add_to(counter_fd, count)

    def _available(self, counter_fd: int, ended_fd: int) -> int:
        """Wait until this end may write or read at least one byte. Return the number of bytes."""
        while self._count == 0:
            self._count = shared_memory.taken_from(counter_fd)
            if self._count == 0 and not shared_memory.wait_for_either(counter_fd, ended_fd, for_end=True):
                raise RingEndedError("the other process is gone")
        return self._count
