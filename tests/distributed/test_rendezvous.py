"""Ranks over the network: who is let in, who is refused, and what a hostile peer can send."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields, replace

import msgspec
import numpy as np
import pytest

from octavo.batch import BlockBytes, DomainRows
from octavo.distributed import rank_messages, rendezvous
from octavo.distributed.connection import Connection, ConnectionEndedError
from octavo.distributed.rank_messages import (
    Challenge,
    DomainTensors,
    Joining,
    MalformedRankMessageError,
    RankFailed,
    RunStep,
    StageValues,
    Tensor,
    batch_of,
    decode,
    encode,
    hello,
    moved_tensors,
    step_message,
)
from octavo.distributed.rendezvous import HELLO_BYTES, accept_ranks, address_of, connect
from octavo.errors import EngineDeadError, UsageError
from tests.support.batches import Request, step
from tests.support.sampling_batches import sampling_batch
from tests.support.waiting import wait_until

TOKEN = "a secret of the cluster"


@pytest.fixture
def address() -> tuple[str, int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return "127.0.0.1", free.getsockname()[1]


@pytest.fixture
def leader(address: tuple[str, int]) -> Iterator[Future[dict[int, Connection]]]:
    """Waits for the ranks 1 and 2."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(accept_ranks, address, TOKEN, range(1, 3), 20.0)


def test_all_ranks_come(leader: Future[dict[int, Connection]], address: tuple[str, int]) -> None:
    ranks = {rank: connect(address, TOKEN, rank, 10.0) for rank in (2, 1)}
    found = leader.result(20)
    assert sorted(found) == [1, 2]
    for rank, connection in ranks.items():
        connection.send(Joining())
        assert isinstance(found[rank].receive(), Joining)
        connection.close()


@pytest.mark.parametrize(
    ("token", "rank", "version", "reason"),
    [
        ("another", 1, None, "its OCTAVO_CLUSTER_TOKEN is different"),
        (TOKEN, 1, "0.0.1", "it runs octavo 0.0.1, the leader"),
        (TOKEN, 7, None, "rank 7 is not one of 1 to 2"),
    ],
)
def test_refused_ranks(
    leader: Future[dict[int, Connection]],
    address: tuple[str, int],
    token: str,
    rank: int,
    version: str | None,
    reason: str,
) -> None:
    refused = greeted(address)
    challenge = refused.receive()
    assert isinstance(challenge, Challenge)
    message = hello(rank, token, challenge.nonce)
    refused.send(message if version is None else type(message)(version, message.protocol, rank, message.proof))
    answer = refused.receive()
    assert isinstance(answer, RankFailed)
    assert reason in answer.reason
    with pytest.raises(ConnectionEndedError):
        refused.receive()
    assert not leader.done()
    for each in (1, 2):  # whom it does not keep out
        connect(address, TOKEN, each, 10.0)
    assert len(leader.result(20)) == 2


def greeted(address: tuple[str, int]) -> Connection:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        with suppress(ConnectionRefusedError):
            return Connection(socket.create_connection(address, timeout=10))
    raise AssertionError("nobody listens")


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\xff" * 64, (1 << 40).to_bytes(8, "little"), b"", encode(Joining())],
)
def test_strangers_keep_nobody_out(
    leader: Future[dict[int, Connection]], address: tuple[str, int], data: bytes
) -> None:
    greeted(address).close()
    with socket.create_connection(address, timeout=10) as stranger:
        stranger.sendall(data)
        for rank in (1, 2):  # while the stranger is still there
            connect(address, TOKEN, rank, 10.0)
        assert len(leader.result(20)) == 2


def test_a_stranger_that_sends_byte_after_byte_is_closed_in_time(
    leader: Future[dict[int, Connection]], address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_HELLO_S", 0.5)
    greeted(address).close()
    with socket.create_connection(address, timeout=10) as stranger:
        began = time.monotonic()
        stranger.sendall(HELLO_BYTES.to_bytes(8, "little"))
        with suppress(OSError):  # reset, or a broken pipe
            while time.monotonic() - began < 5:
                stranger.sendall(b"\0")
                time.sleep(0.1)  # timed: a stranger that is slow
        assert time.monotonic() - began < 3
    for rank in (1, 2):
        connect(address, TOKEN, rank, 10.0)
    assert len(leader.result(20)) == 2


def test_a_machine_without_power_counts_as_gone(
    leader: Future[dict[int, Connection]], address: tuple[str, int]
) -> None:
    """The system ends connections of which nothing is acknowledged; by itself it waits a quarter of an hour."""
    for rank in (1, 2):
        connect(address, TOKEN, rank, 10.0)
    for connection in leader.result(20).values():
        assert connection._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000


def test_a_rank_that_does_not_come(address: tuple[str, int]) -> None:
    with pytest.raises(EngineDeadError, match=r"rank 1, 2 did not connect .* within 0 s"):
        accept_ranks(address, TOKEN, range(1, 3), 0.2)


def test_no_leader(address: tuple[str, int]) -> None:
    with pytest.raises(EngineDeadError, match="could not be reached"):
        connect(address, TOKEN, 1, 0.1)


@pytest.mark.parametrize("text", ["host", "host:", ":1", "host:0", "host:70000", "host:x"])
def test_addresses(text: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        address_of(text)


def test_messages_are_checked() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    message = decode(encode(StageValues(3, [Tensor.of(array)])))
    assert isinstance(message, StageValues)
    np.testing.assert_array_equal(message.arrays[0].array(), array)
    for tensor in (
        Tensor("float32", (2, 4), bytearray(array.tobytes())),
        Tensor("object", (1,), bytearray(8)),
        Tensor("float32", (-1, -6), bytearray(array.tobytes())),
    ):
        with pytest.raises(MalformedRankMessageError):
            tensor.array()
    for data in (b"", b"\x91\xa1x", b"\xff" * 9, encode(message)[:-1]):
        with pytest.raises(MalformedRankMessageError):
            decode(data)


def test_sampling_options_of_a_step() -> None:
    rng = np.random.default_rng(0)
    sampling = replace(
        sampling_batch(3, temperature=0.7, top_k=5, seed=rng.integers(0, 2**63, 3, dtype=np.uint64)),
        history_start=np.array([0, 2, 2, 3], np.int32),
        history_ids=np.array([1, 2, 3], np.int32),
        history_counts=np.array([0, 1, 2], np.int32),
        allowed_mask=rng.integers(0, 2**32, (3, 4), dtype=np.uint32),
    )
    batch = replace(step([(Request([1, 2, 3], [0]), 3)], block_size=16, num_groups=1), sampling=sampling)
    message = decode(encode(step_message(1, batch, with_sampling=True)))
    assert isinstance(message, RunStep)
    found = batch_of(message, ()).sampling
    assert found is not None
    for field in fields(sampling):
        np.testing.assert_array_equal(getattr(found, field.name), getattr(sampling, field.name))
    assert batch_of(step_message(1, batch), ()).sampling is None
    for wrong in (message.sampling[:-2], message.sampling[1:]):
        with pytest.raises(MalformedRankMessageError):
            batch_of(msgspec.structs.replace(message, sampling=wrong), ())


def test_rows_of_domains_of_a_step() -> None:
    batch = step([(Request([1, 2, 3], [0]), 3)], block_size=16, num_groups=1)
    values, index = np.arange(8, dtype=np.float32).reshape(2, 4), np.array([-1, 1, 0], np.int32)
    starts, positions = np.array([0, 2], np.int32), np.array([[3, 4], [5, 6]], np.int32)
    lengths, slots = np.array([2], np.int32), np.array([[16, 17]], np.int32)
    patches = DomainRows(2, starts, positions, lengths=lengths, slots=slots)
    domains = {"patches": patches, "tokens": DomainRows(3, indices={"soft": index})}
    message = decode(encode(step_message(1, replace(batch, inputs=(values,), domains=domains))))
    assert isinstance(message, RunStep)
    found = batch_of(message, None)
    np.testing.assert_array_equal(found.inputs, [values])
    assert batch_of(message, ()).inputs == ()  # a later stage has those of the one before
    for name, rows in domains.items():
        for field in ("count", "starts", "positions", "lengths", "slots"):
            np.testing.assert_array_equal(getattr(found.domains[name], field), getattr(rows, field))
    np.testing.assert_array_equal(found.domains["tokens"].indices["soft"], index)
    flat, floats = Tensor.of(index), Tensor.of(values)
    for wrong in (
        DomainTensors(-1, None, None, {}),
        DomainTensors(2**31, None, None, {}),
        DomainTensors(3, floats, None, {}),
        DomainTensors(3, None, flat, {}),
        DomainTensors(3, None, None, {"soft": floats}),
        DomainTensors(3, None, None, {}, lengths=floats),
        DomainTensors(3, None, None, {}, slots=flat),
        DomainTensors(3, None, None, {"soft": Tensor("int32", (4,), flat.data)}),
    ):
        with pytest.raises(MalformedRankMessageError):
            batch_of(msgspec.structs.replace(message, domains={"tokens": wrong}), None)
    with pytest.raises(MalformedRankMessageError):
        batch_of(msgspec.structs.replace(message, inputs=[flat]), None)


def test_messages_of_any_size_in_both_directions() -> None:
    """Larger than the buffers of a socket, with a slow reader."""
    near, far = socket.socketpair()
    ours, theirs = Connection(near), Connection(far)
    arrays = [np.random.default_rng(n).standard_normal((n, 257)).astype(np.float32) for n in (0, 1, 3, 4000)]
    sender = threading.Thread(
        target=lambda: [ours.send(StageValues(n, [Tensor.of(a)])) for n, a in enumerate(arrays)], daemon=True
    )
    sender.start()
    room = select.poll()  # not `select`, which fails for descriptors above 1023
    room.register(near, select.POLLOUT)
    wait_until(lambda: not room.poll(0))
    for number, array in enumerate(arrays):
        message = theirs.receive()
        assert isinstance(message, StageValues)
        assert message.number == number
        np.testing.assert_array_equal(message.arrays[0].array(), array)
    ours.close()
    with pytest.raises(ConnectionEndedError):
        theirs.receive()


def test_a_message_that_is_too_long_ends_the_connection() -> None:
    ours, theirs = (Connection(sock) for sock in socket.socketpair())
    ours.send(StageValues(1, [Tensor("float32", (4096,), bytearray(1 << 14))]))
    with pytest.raises(ConnectionEndedError, match="more than 4096"):
        theirs.receive(4096)
    assert rank_messages.MAX_MESSAGE_BYTES > 1 << 30


def test_ranks_that_cannot_come_are_not_waited_for() -> None:
    def check() -> None:
        raise EngineDeadError("rank 1 is gone; Ray reports: killed")

    start = time.monotonic()
    with pytest.raises(EngineDeadError, match="Ray reports: killed"):
        accept_ranks(("127.0.0.1", 0), "token", [1], 60, check=check)
    assert time.monotonic() - start < 5


def test_moved_blocks_of_a_step() -> None:
    """A rank gets its part, which may be narrower than its room."""
    data = np.arange(24, dtype=np.uint8).reshape(2, 12)
    batch = step([(Request([1, 2, 3], [0]), 3)], block_size=16, num_groups=1)
    batch = replace(batch, block_loads=BlockBytes(np.array([4, 2], np.int32), data))
    batch.snapshot_saves = BlockBytes(np.array([1], np.int32), data[:1, :4])
    message = msgspec.structs.replace(step_message(1, batch), moved=moved_tensors(batch, (6, 12), (0, 4)))
    received = decode(encode(message))
    assert isinstance(received, RunStep)
    found = batch_of(received, (), 5, 3)
    assert found.block_loads is not None
    assert found.block_loads.block_ids.tolist() == [4, 2]
    np.testing.assert_array_equal(found.block_loads.data, data[:, 6:11])
    assert found.snapshot_saves is not None
    assert found.snapshot_saves.block_ids.tolist() == [1]
    assert found.snapshot_saves.data.shape == (1, 3)
    for block_bytes, state_bytes, moved in ((7, 3, received.moved), (5, 5, received.moved), (5, 3, received.moved[1:])):
        with pytest.raises(MalformedRankMessageError):
            batch_of(msgspec.structs.replace(received, moved=moved), (), block_bytes, state_bytes)
