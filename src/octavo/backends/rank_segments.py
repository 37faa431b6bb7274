"""The names of the shared memory that ranks use, and its removal when the ranks could not remove it.

A group `NAME` of ranks on one machine has the segments `octavo-NAME-RANK` (csrc/collective.h). The ranks remove the
names once all have joined, so a name that remains belongs to ranks that were killed before that.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress

from octavo.platform import files, shared_memory

_SEGMENT_NAME = re.compile(r"octavo-[0-9a-f]{16}-\d+-\d+")
_LEFT_OVER_S = 600.0  # ten times as long as ranks wait for each other


def remove_segments(name: str) -> None:
    """Remove the segments of all groups whose names begin with `name`. All their ranks must have ended."""
    for path in shared_memory.named_segments(f"octavo-{name}-"):
        with suppress(OSError):
            path.unlink()


def remove_leftovers() -> None:
    """Remove this user's segments whose ranks were all killed while starting."""
    for path in shared_memory.named_segments("octavo-"):
        with suppress(OSError):
            found = path.lstat()
            is_old = time.time() - found.st_mtime > _LEFT_OVER_S
            if is_old and found.st_uid == files.user_id() and _SEGMENT_NAME.fullmatch(path.name):
                path.unlink()
