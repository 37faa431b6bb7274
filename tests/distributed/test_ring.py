"""The ring between two processes: every byte in its order, whatever the sizes and whoever is slow, and its end."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.distributed.connection import Connection, ConnectionEndedError
from octavo.distributed.rank_messages import RankFailed, StageValues, Tensor
from octavo.distributed.ring import Ring, RingEndedError
from tests.support.waiting import wait_until


def ends(size: int) -> tuple[Ring, Ring]:
    """The writer's and the reader's, as two processes have them."""
    made = Ring.create(size)
    copies = [os.dup(descriptor) for descriptor in made]
    return Ring(made, is_new=True), Ring(copies)


@settings(max_examples=60, deadline=None)
@given(
    size=st.sampled_from([4096, 8192, 12288]),
    writes=st.lists(st.integers(0, 20_000), min_size=1, max_size=20),
    reads=st.lists(st.integers(1, 9_000), min_size=1, max_size=20),
    slow=st.sampled_from(["nobody", "reader", "writer"]),
    seed=st.integers(0, 1 << 16),
)
def test_every_byte_comes_in_its_order(size: int, writes: list[int], reads: list[int], slow: str, seed: int) -> None:
    """Messages shorter and longer than the ring, pieces of any length, over its end and around."""
    writer, reader = ends(size)
    alive, other = socket.socketpair()
    data = random.Random(seed).randbytes(sum(writes))

    def write() -> None:
        at = 0
        for count in writes:
            if slow == "writer":
                time.sleep(0.001)  # timed: the slow side
            writer.write(data[at : at + count], alive.fileno())
            at += count

    thread = threading.Thread(target=write)
    thread.start()
    found, number = bytearray(), 0
    while len(found) < len(data):
        count = min(reads[number % len(reads)], len(data) - len(found))
        number += 1
        piece = bytearray(count)
        if slow == "reader":
            time.sleep(0.001)  # timed: the slow side
        reader.read_into(memoryview(piece), other.fileno())
        found += piece
    thread.join(10)
    assert not thread.is_alive()
    assert found == data
    assert not reader.has_bytes()
    alive.close()
    other.close()


def test_the_end_of_the_other_process_is_noticed() -> None:
    writer, reader = ends(4096)
    ours, theirs = socket.socketpair()
    writer.write(b"last", ours.fileno())
    theirs.close()
    piece = bytearray(4)
    reader.read_into(memoryview(piece), ours.fileno())  # what it wrote before is still read
    assert bytes(piece) == b"last"
    for wait in (
        lambda: reader.read_into(memoryview(bytearray(1)), ours.fileno()),
        lambda: writer.write(bytes(10_000), ours.fileno()),
    ):
        start = time.monotonic()
        with pytest.raises(RingEndedError, match="gone"):
            wait()
        assert time.monotonic() - start < 1
    ours.close()


@pytest.fixture
def connections() -> Iterator[tuple[Connection, Connection]]:
    """Over rings, as a leader and its child have them."""
    (a_out, b_in), (b_out, a_in) = ends(1 << 16), ends(1 << 16)
    ours, theirs = socket.socketpair()
    found = Connection(ours, (a_out, a_in)), Connection(theirs, (b_out, b_in))
    yield found
    for connection in found:
        connection.close()


def test_signs_of_life_pass_a_full_ring(connections: tuple[Connection, Connection]) -> None:
    """A reader that is slow for longer than the time between signs of life."""
    ours, theirs = connections
    ours.stay_alive()
    array = np.random.default_rng(0).standard_normal((500, 257)).astype(np.float32)  # eight times the ring
    sender = threading.Thread(target=lambda: ours.send(StageValues(7, [Tensor.of(array)])), daemon=True)
    sender.start()

    def signs() -> int:
        with suppress(BlockingIOError):
            return len(theirs._socket.recv(1 << 16, socket.MSG_PEEK | socket.MSG_DONTWAIT)) // 8
        return 0

    wait_until(lambda: signs() >= 2)
    theirs._socket.recv(2 * 8)
    assert sender.is_alive()  # the message waits
    message = theirs.receive()
    assert isinstance(message, StageValues)
    np.testing.assert_array_equal(message.arrays[0].array(), array)


def test_the_last_message_of_a_rank_comes_before_its_end(connections: tuple[Connection, Connection]) -> None:
    ours, theirs = connections
    theirs.send(RankFailed("EngineDeadError", "no room"))
    theirs.close()
    message = ours.receive()
    assert isinstance(message, RankFailed)
    assert message.reason == "no room"
    with pytest.raises(ConnectionEndedError):
        ours.receive()


def test_a_connection_closed_here_ends_its_reader(connections: tuple[Connection, Connection]) -> None:
    ours, _ = connections
    ended = threading.Event()

    def read() -> None:
        with pytest.raises(ConnectionEndedError):
            ours.receive()
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    time.sleep(0.1)  # timed: nothing shows that a thread reads; it needs a moment to begin
    ours.close()
    assert ended.wait(5)
