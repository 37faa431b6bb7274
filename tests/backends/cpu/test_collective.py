"""Groups of processes: sums and gathered columns through shared memory, and what happens when a rank is gone."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.backends import rank_segments
from octavo.backends.cpu import _native, _native_tests, rank_group
from octavo.platform import shared_memory
from tests.support.native_sources import CSRC, platform_sources, run_stress
from tests.support.numa_nodes import pretend
from tests.support.waiting import wait_until

STRESS = Path(__file__).with_name("collective_stress.cpp")
SHAPES = [(1, 1), (1, 17), (3, 576), (64, 640), (50, 1111)]  # the last two are larger than a buffer


def values(rank: int, shape: tuple[int, int]) -> np.ndarray:
    return np.random.default_rng([rank, *shape]).standard_normal(shape).astype(np.float32)


def join(name: str, rank: int, size: int, **options: Any) -> _native.CollectiveGroup:
    return _native.CollectiveGroup(name, rank, size, buffer_bytes=1 << 16, join_ms=60000, **options)


def exchange(name: str, rank: int, size: int, pipe: Connection) -> None:
    """Sums and gathers arrays of all shapes three times, the columns of ranks being of different widths."""
    group, found = join(name, rank, size), []
    for _ in range(3):
        for shape in SHAPES:
            x = values(rank, shape)
            _native_tests.all_reduce(group, x)
            part = values(rank, (shape[0], shape[1] + rank))
            gathered = np.empty((shape[0], sum(shape[1] + r for r in range(size))), np.float32)
            _native_tests.all_gather(group, part, gathered)
            found.append((x, gathered))
    pipe.send(found)


@pytest.fixture(autouse=True)
def _no_rank_outlives_its_test() -> Iterator[None]:
    """Also after a failure: at exit multiprocessing waits for its processes, and a stopped one would never end."""
    yield
    for rank in multiprocessing.active_children():
        rank.kill()
        rank.join()


def start(size: int, target: Callable[..., None], *arguments: Any) -> tuple[str, list[Any], list[Connection]]:
    name, context = secrets.token_hex(6), multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(size)]
    ranks = [context.Process(target=target, args=(name, r, size, pipes[r][1], *arguments)) for r in range(size)]
    for rank in ranks:
        rank.start()
    return name, ranks, [ours for ours, _ in pipes]


def assert_nothing_left(name: str) -> None:
    assert not [path for path in Path("/dev/shm").iterdir() if name in path.name]


@pytest.mark.parametrize("size", [2, 3])
def test_sums_and_gathered_columns(size: int) -> None:
    name, ranks, pipes = start(size, exchange)
    found = [pipe.recv() for pipe in pipes]
    for rank in ranks:
        rank.join(30)
    for at, shape in enumerate(SHAPES * 3):
        total = values(0, shape)
        for rank in range(1, size):
            total = total + values(rank, shape)  # in the order of the ranks: the same bits
        columns = np.concatenate([values(r, (shape[0], shape[1] + r)) for r in range(size)], axis=1)
        for rank in range(size):
            np.testing.assert_array_equal(found[rank][at][0], total)
            np.testing.assert_array_equal(found[rank][at][1], columns)
    assert_nothing_left(name)


# The constructor stores the pointer to the rank's own segment once more after the heart has begun to read it.
SUPPRESSIONS = "race_top:octavo::CollectiveGroup::open_peers\n"


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_ranks_with_pools_that_come_late_give_up_and_end(sanitizer: str, tmp_path: Path) -> None:
    """Threads of one program instead of processes: a sanitizer sees what they share."""
    names = ("collective.cpp", "thread_pool.cpp", "memory.cpp", "isa.cpp", "kernels/collective.cpp")
    sources = [STRESS, *(CSRC / name for name in names)]
    sources += [path for path in platform_sources() if path.name != "sharing.cpp"]
    run_stress(sources, tmp_path, "30", sanitizer=sanitizer, suppressions=SUPPRESSIONS)


def wait_for_the_last(name: str, rank: int, size: int, pipe: Connection) -> None:
    """Rank 0 sums at once and says that it waits; the other one comes when it is told to."""
    group = join(name, rank, size)
    pipe.send(group.is_waiting)
    if rank == 0:
        threading.Thread(target=lambda: pipe.send(wait_until(lambda: group.is_waiting))).start()
    else:
        pipe.recv()
    _native_tests.all_reduce(group, np.ones((1, 4), np.float32))
    pipe.send(group.is_waiting)


def test_a_rank_says_that_it_waits() -> None:
    _, ranks, pipes = start(2, wait_for_the_last)
    assert [pipe.recv() for pipe in pipes] == [False, False]
    assert pipes[0].recv()
    pipes[1].send("go on")
    assert [pipe.recv() for pipe in pipes] == [False, False]
    for rank in ranks:
        rank.join(30)


def sum_until_error(name: str, rank: int, size: int, pipe: Connection, victim: int) -> None:
    group = join(name, rank, size, silence_ms=1000)
    pipe.send(os.getpid())
    x = np.ones((4, 256), np.float32)
    try:
        while True:
            if rank == victim:
                time.sleep(0.2)  # timed: slower than the other ranks; that alone is no error
            _native_tests.all_reduce(group, x)
            x[:] = 1
    except RuntimeError as error:
        pipe.send((str(error), time.monotonic()))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_gone_ends_the_exchange_of_all_others(number: signal.Signals) -> None:
    name, ranks, pipes = start(3, sum_until_error, 1)
    pids = [pipe.recv() for pipe in pipes]
    time.sleep(1.5)  # timed: exchanges go on for longer than the silence that counts
    assert not pipes[0].poll()
    hit_at = time.monotonic()
    os.kill(pids[1], number)
    for survivor in (0, 2):
        assert pipes[survivor].poll(10)
        message, at = pipes[survivor].recv()
        assert "has died or was stopped" in message or "has given up" in message
        assert at - hit_at < 5
    os.kill(pids[1], signal.SIGKILL)
    for rank in ranks:
        rank.join(10)
    assert_nothing_left(name)


def test_a_rank_that_lives_and_does_not_reach_the_exchange() -> None:
    """Its heart beats. The others give up at the deadline; it has what they gave before, and then no more."""
    name = secrets.token_hex(6)
    with ThreadPoolExecutor(2) as pool:
        late, waiting = pool.map(lambda rank: join(name, rank, 2, deadline_ms=1000, silence_ms=800), range(2))
    x, start = np.ones((1, 4), np.float32), time.monotonic()
    with pytest.raises(RuntimeError, match="rank 0 of 2 is alive but did not reach the exchange within 1 s"):
        _native_tests.all_reduce(waiting, x)
    assert 1 <= time.monotonic() - start < 3
    of_late = np.ones((1, 4), np.float32)
    _native_tests.all_reduce(late, of_late)
    assert (of_late == 2).all()
    with pytest.raises(RuntimeError, match="rank 1 of 2 has given up or exited"):
        _native_tests.all_reduce(late, of_late)
    start = time.monotonic()
    for group in (late, waiting):  # at once, from now on
        with pytest.raises(RuntimeError):
            _native_tests.all_reduce(group, x)
    assert time.monotonic() - start < 0.5


def test_a_rank_that_does_not_come() -> None:
    name = secrets.token_hex(6)
    with pytest.raises(RuntimeError, match="rank 1 did not join the group"):
        _native.CollectiveGroup(name, 0, 2, buffer_bytes=4096, join_ms=100)
    assert_nothing_left(name)


def test_waiting_for_a_rank_is_given_up() -> None:
    name, asked = secrets.token_hex(6), []

    def given_up() -> str:
        asked.append(time.monotonic())
        return "rank 1 is gone" if len(asked) == 3 else ""

    with pytest.raises(RuntimeError, match=r"^rank 1 is gone$"):
        _native.CollectiveGroup(name, 0, 2, buffer_bytes=4096, join_ms=60000, given_up=given_up)
    assert asked[-1] - asked[0] < 5
    assert_nothing_left(name)


def place(name: str, rank: int, size: int, pipe: Connection, node: int) -> None:
    """Where the kernel has the pages of both ranks, as this one sees them: the policy, and pages by node."""
    group = join(name, rank, size, numa_node=node)
    _native_tests.all_reduce(group, values(rank, SHAPES[-1]))
    lines = [line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines() if name in line]
    found = [(words[1], {each.partition("=")[0] for each in words if each.startswith("N")}) for words in lines]
    pipe.send((group.placement_error, found))
    pipe.recv()  # the others look at this rank's memory


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="this kernel knows no NUMA nodes")
@pytest.mark.parametrize("node", [0, 1000, -1])
def test_the_memory_of_a_rank_is_on_its_node(node: int) -> None:
    """Without a node, or where the kernel refuses it, pages are wherever they are first touched."""
    if node == 1000 and Path("/sys/devices/system/node/node1000").exists():
        pytest.skip("this machine has that node")
    name, ranks, pipes = start(2, place, node)
    for error, found in [pipe.recv() for pipe in pipes]:
        if error == errno.EPERM:
            pytest.skip("this container may not place memory")
        assert error == (errno.EINVAL if node == 1000 else 0)
        assert [policy for policy, _ in found] == ["prefer:0" if node == 0 else "default"] * 2
        if node == 0:
            assert all(nodes == {"N0"} for _, nodes in found)
    for pipe in pipes:
        pipe.send(None)
    for rank in ranks:
        rank.join(10)
    assert_nothing_left(name)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 65), (0, 0)])
def test_invalid_ranks(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="a group has 1 to 64 ranks"):
        _native.CollectiveGroup("x", rank, size)


def test_a_name_is_no_path() -> None:
    with pytest.raises(ValueError, match="letters, digits"):
        _native.CollectiveGroup("../x", 0, 2)


def test_segments_left_by_killed_ranks_are_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of ranks that were all killed before they had come together; names of others stay."""
    monkeypatch.setattr(shared_memory, "SEGMENTS", tmp_path)
    left, new, other = (tmp_path / name for name in (f"octavo-{'a' * 16}-0-1", f"octavo-{'b' * 16}-0-1", "octavo-x"))
    for path in (left, new, other):
        path.write_bytes(b"")
    for path in (left, other):
        os.utime(path, (time.time() - 700,) * 2)
    rank_segments.remove_leftovers()
    assert sorted(tmp_path.iterdir()) == sorted([new, other])
    rank_segments.remove_segments("b" * 16)
    assert list(tmp_path.iterdir()) == [other]


@pytest.mark.parametrize(("nodes", "level"), [(("0-63",), "DEBUG"), (("0-63", "64"), "WARNING")])
def test_memory_that_cannot_be_placed_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, nodes: tuple[str], level: str
) -> None:
    """With one node there is nothing to lose."""
    pretend(monkeypatch, tmp_path, *nodes)
    refused = _native.CollectiveGroup(secrets.token_hex(6), 0, 1, numa_node=1000)
    caplog.set_level("DEBUG", "octavo")
    rank_group._note_placement(refused, 0)
    ((_, found, text),) = [record for record in caplog.record_tuples if "NUMA node 0" in record[2]]
    assert logging.getLevelName(found) == level
    assert text.endswith(os.strerror(refused.placement_error))
