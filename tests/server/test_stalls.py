"""No body stops the streams of others, or what is asked about the server's health, for long.

`benchmarks/large_bodies.py` sends the same kinds at their full size, from four clients at once, with the limits that
hold on a quiet machine.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.large_bodies import StreamWatch, hostile_bodies, stream_watch
from tests.support.server import RunningServer

BODIES = hostile_bodies(1_000_000)
# Each of them took a second or several; so do some gaps of a busy machine, but not always.
MAX_WAIT_S = 0.7
TRIES = 3
MAX_GROWTH = 8
_FLOOR_BYTES = 24 << 20  # of small bodies, and of memory that the allocator keeps


@pytest.fixture(scope="module")
def watch(server: RunningServer) -> Iterator[StreamWatch]:
    with stream_watch(server.url, server.process.pid) as running:
        yield running


@pytest.mark.parametrize("kind", BODIES)
def test_others_go_on_meanwhile(kind: str, watch: StreamWatch) -> None:
    path, body = BODIES[kind]
    waits = []
    for _ in range(TRIES):
        found = watch.send(path, body, 1)
        assert found.statuses[0] in (200, 400), found.statuses
        assert found.growth <= MAX_GROWTH * len(body) + _FLOOR_BYTES
        waits.append(max(found.gap, found.health))
        if waits[-1] <= MAX_WAIT_S:
            break
    assert min(waits) <= MAX_WAIT_S, waits
