"""Limits on the time and memory of a block of code, for tests of hostile files."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

MAX_SECONDS = 2.0
MAX_GROWTH_BYTES = 64 << 20


@contextlib.contextmanager
def bounded(seconds: float = MAX_SECONDS, growth_bytes: int = MAX_GROWTH_BYTES) -> Iterator[None]:
    """Fail if the block computes for longer, or if peak resident memory grows by more than this."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the present
        before = _status_bytes("VmRSS")
    except OSError:  # some sandboxes forbid it: then only what exceeds the old peak is seen
        before = _status_bytes("VmHWM")
    started = time.process_time()
    yield
    took = time.process_time() - started
    grown = _status_bytes("VmHWM") - before
    assert took < seconds, f"took {took:.2f} s"
    assert grown < growth_bytes, f"grew by {grown / (1 << 20):.1f} MiB"


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {field} in /proc/self/status")
