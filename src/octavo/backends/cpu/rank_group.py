"""The group of ranks on one machine that compute parts of the same layers, over shared memory."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from octavo.backends.cpu import _native
from octavo.backends.cpu.compile import (
    CompileOptions,
    compile,  # noqa: A004 - the backend protocol's name
)
from octavo.backends.cpu.executor import CpuExecutor
from octavo.errors import EngineDeadError

_SEGMENTS = Path("/dev/shm")
_SEGMENT_NAME = re.compile(r"octavo-[0-9a-f]{16}-\d+-\d+")
_LEFT_OVER_S = 600.0  # ten times as long as ranks wait for each other


class CpuRankGroup:
    """Implements `octavo.backends.RankGroup`."""

    def __init__(self, group: _native.CollectiveGroup) -> None:
        self._group = group

    @property
    def error(self) -> str:
        return self._group.error

    def fail(self, reason: str) -> None:
        self._group.fail(reason)

    def compile(self, *arguments: Any, **options: Any) -> CpuExecutor:
        """As `octavo.backends.cpu.compile`, for the graph of this rank."""
        return compile(*arguments, options=CompileOptions(group=self._group), **options)


def join_group(name: str, rank: int, size: int, buffer_bytes: int) -> CpuRankGroup:
    """See `octavo.backends.Backend`. The ranks share memory: they are on one machine."""
    remove_leftovers()
    try:
        return CpuRankGroup(_native.CollectiveGroup(name, rank, size, buffer_bytes=buffer_bytes))
    except RuntimeError as error:
        raise EngineDeadError(f"the ranks of this machine do not come together: {error}") from None


def remove_leftovers() -> None:
    """Removes this user's segments of ranks that were all killed at their start.

    Ranks take the names of their segments away once they have come together, so an old name has no owner.
    """
    for path in _SEGMENTS.glob("octavo-*"):
        with suppress(OSError):
            found = path.lstat()
            is_old = time.time() - found.st_mtime > _LEFT_OVER_S
            if is_old and found.st_uid == os.geteuid() and _SEGMENT_NAME.fullmatch(path.name):
                path.unlink()
