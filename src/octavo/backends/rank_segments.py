"""The names of the shared memory of ranks, and its removal where the ranks could not do it.

A group `NAME` of ranks on one machine has the segments `octavo-NAME-RANK` (csrc/collective.h). Ranks take
the names away once they have come together, so a name that stays is of ranks that were killed before.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress

from octavo.platform import files, shared_memory

_SEGMENT_NAME = re.compile(r"octavo-[0-9a-f]{16}-\d+-\d+")
_LEFT_OVER_S = 600.0  # ten times as long as ranks wait for each other


def remove_segments(name: str) -> None:
    """Remove those of all groups whose names begin so. All their ranks have ended."""
    for path in shared_memory.named_segments(f"octavo-{name}-"):
        with suppress(OSError):
            path.unlink()


def remove_leftovers() -> None:
    """Remove this user's segments of ranks that were all killed at their start."""
    for path in shared_memory.named_segments("octavo-"):
        with suppress(OSError):
            found = path.lstat()
            is_old = time.time() - found.st_mtime > _LEFT_OVER_S
            if is_old and found.st_uid == files.user_id() and _SEGMENT_NAME.fullmatch(path.name):
                path.unlink()
