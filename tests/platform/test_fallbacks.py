"""The platform layer without the features of Linux: no memfd, no eventfd, no /proc, no affinity, no process control."""

from __future__ import annotations

import errno
import os
import select
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from octavo.backends import rank_segments
from octavo.backends.memory import host_memory
from octavo.core.liveness import run_queue_meter
from octavo.distributed.connection import Connection
from octavo.distributed.leader import _new_rings
from octavo.distributed.rank_messages import RankFailed
from octavo.distributed.ring import Ring
from octavo.platform import files, limits, locks, memory, numa, processes, processors, shared_memory, threads
from octavo.platform.folders import Folder


@pytest.fixture(params=["darwin", "win32"])
def elsewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer believes that it is on this system."""
    monkeypatch.setattr(sys, "platform", request.param)


@pytest.fixture
def without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(processes, "_PROC", tmp_path / "proc")


def test_ranks_talk_over_their_socket_where_memory_has_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(OSError, match="no memory with a descriptor") as refused:
        Ring.create()
    assert refused.value.errno == errno.ENOSYS
    rings, here, there = _new_rings()
    assert (rings, here, there) == (None, (), ())
    ours, theirs = (Connection(end, rings) for end in socket.socketpair())
    ours.send(RankFailed("OctavoError", "it passes"))
    received = theirs.receive()
    assert isinstance(received, RankFailed)
    assert received.reason == "it passes"
    ours.close()
    theirs.close()


def test_rings_need_counters_too(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.delattr(os, "eventfd")
    assert _new_rings() == (None, (), ())
    assert set(os.listdir("/proc/self/fd")) == before  # the memory that was made is closed


def test_a_lack_of_descriptors_is_still_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "memfd_create", none_left)
    with pytest.raises(OSError, match="too many"):
        _new_rings()


def test_memory_and_quota_without_proc_and_control_groups(tmp_path: Path) -> None:
    assert 0 < host_memory(tmp_path / "proc", tmp_path / "groups").available_bytes <= memory.total_bytes()
    assert processors.cpu_quota(tmp_path / "groups", tmp_path / "cgroup") is None
    assert processors.physical_cores({0, 1, 2}, tmp_path / "topology") == 3


@pytest.mark.usefixtures("without_proc")
def test_processes_without_proc() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert processes.state_of(child.pid) == "?"
        assert not processes.has_exited(child.pid)
        assert processes.start_of(child.pid) == 0
        assert processes.resident_bytes(child.pid) == 0
        assert run_queue_meter(child.pid).sample() is False
    finally:
        child.communicate(b"\n")
    assert processes.has_exited(child.pid)
    assert processes.start_of(child.pid) is None
    processes.prefer_for_oom()  # does nothing


@pytest.mark.usefixtures("elsewhere")
def test_affinity_on_other_systems() -> None:
    assert processors.allowed_cpus() == set(range(os.cpu_count() or 1))
    with processors.kept_affinity():
        pass
    with pytest.raises(OSError, match="binds no threads"):
        processors.bind({0})
    assert numa.cpus_of_process(0, 3, 1) is None


@pytest.mark.usefixtures("elsewhere")
def test_segments_and_threads_on_other_systems() -> None:
    threads._close_range.cache_clear()
    assert shared_memory.named_segments("octavo-") == []
    rank_segments.remove_leftovers()
    threads.close_files_of_this_thread()  # this thread keeps its files
    os.fstat(0)
    threads._close_range.cache_clear()


def test_a_child_on_another_system_ends_with_its_parent() -> None:
    """Where the kernel does not kill it: a thread of the child looks for the parent."""
    child = "import sys; sys.platform = 'darwin'; from octavo.platform import processes; import os\n"
    child += "processes.end_with(os.getppid()); print('ready', flush=True); import threading; threading.Event().wait()"
    parent = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); print(child.pid, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    watch = os.pidfd_open(pid)
    process.communicate(b"")
    try:
        poll = select.poll()  # select.select takes no descriptor above 1023, and a whole run has more
        poll.register(watch, select.POLLIN)
        assert poll.poll(30_000), "the child outlives its parent"
    finally:
        os.close(watch)


def test_files_on_windows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    with path.open("r+b", buffering=0) as file:
        assert files.pread(file.fileno(), 3, 4) == b"456"
        assert files.pwrite(file.fileno(), b"ab", 8) == 2
        files.reserve(file.fileno(), 20)
        files.reserve(file.fileno(), 5)
        files.drop_cached(file.fileno())
    assert path.read_bytes() == b"01234567ab" + bytes(10)
    assert files.user_id() == 0
    assert files.free_bytes(tmp_path) > 0
    assert not files.is_hollow(path)
    files.sync_folder(tmp_path / "missing")  # nothing to do


def test_reads_into_memory_without_preadv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    found = {}
    for name in ("with", "without"):
        buffer = bytearray(6)
        with path.open("rb") as file:
            found[name] = (files.read_into(file.fileno(), memoryview(buffer), 7), bytes(buffer))
        monkeypatch.delattr(os, "preadv", raising=False)
    assert found["with"] == found["without"] == (3, b"789\0\0\0")


def test_writes_of_pieces_without_pwritev(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("with", "without"):
        with (tmp_path / name).open("wb") as file:
            assert files.write_pieces(file.fileno(), [b"12", memoryview(b"345")], 2) == 5
        assert (tmp_path / name).read_bytes() == b"\0\x0012345"
        monkeypatch.delattr(os, "pwritev", raising=False)


@pytest.mark.parametrize("system", ["linux", "win32"])
def test_a_folder_by_descriptor_and_by_path(system: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", system)
    folder = Folder(tmp_path)
    with folder.opened("a", os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
        os.write(file, b"1")
    folder.rename("a", "b")
    folder.sync()
    assert folder.names() == ["b"]
    assert folder.status_of("b").st_size == 1
    assert folder.status().st_ino == tmp_path.stat().st_ino
    folder.remove("b")
    assert list(tmp_path.iterdir()) == []
    folder.close()


def test_a_lock_is_one_process_at_a_time(tmp_path: Path) -> None:
    first, second = (os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2))
    locks.lock_now(first)
    with pytest.raises(BlockingIOError):
        locks.lock_now(second)
    waiting = threading.Thread(target=locks.lock, args=(second,))
    waiting.start()
    os.close(first)
    waiting.join(30)
    assert not waiting.is_alive()
    os.close(second)


def test_a_clock_without_timers_of_the_system_ends_a_process() -> None:
    code = "import sys; sys.platform = 'win32'; from octavo.platform import limits; import threading\n"
    code += "limits.start_clock(60.0, 60.0); limits.stop_clock(); limits.open_nothing(); limits.limit_memory(1)\n"
    code += "limits.start_clock(60.0, 0.05); threading.Event().wait()"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 1


@pytest.mark.usefixtures("elsewhere")
def test_open_files_are_counted_on_other_systems() -> None:
    assert limits.spare_files() > 0
