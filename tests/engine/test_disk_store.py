"""Blocks in files: what was written is there after any end of the process, and no damage gives wrong bytes."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from octavo.engine.kv import disk_store
from octavo.engine.kv.block_tier import BlockRow, as_one, opened
from octavo.engine.kv.cache_identity import CacheIdentity
from octavo.engine.kv.disk_store import DiskStore, open_disk_store
from octavo.engine.kv.segment import RecordHead, SegmentHead

IDENTITY = bytes(range(32))
KEYS = [bytes([i]) * 32 for i in range(4)] + [b"w" * 34, b"s" * 38]  # also of a window's group, and of states
BLOCK = 24


def block(i: int, size: int = BLOCK) -> BlockRow:
    return np.arange(i, i + size).astype(np.uint8)


def open_store(folder: Path, limit: int = 1 << 20) -> DiskStore:
    return DiskStore(folder, IDENTITY, limit)


def found(store: DiskStore) -> dict[bytes, BlockRow | None]:
    """The records as the tier takes them; None: with a wrong digest."""
    records = store.load(KEYS).wait(10)
    assert records is not None
    return {key: opened(key, record, BLOCK) for key, record in zip(KEYS, records, strict=True) if record is not None}


def fill(folder: Path) -> Path:
    """A folder with a segment of all KEYS. Returns the segment."""
    store = open_store(folder)
    for i, key in enumerate(KEYS):
        store.save(key, block(i))
    store.close()
    [segment] = folder.glob("*.octkv")
    return segment


def check(store: DiskStore) -> int:
    """Checks that nothing is wrong. Returns the number of records that are right."""
    records = {key: data for key, data in found(store).items() if data is not None}
    assert all((data == block(KEYS.index(key))).all() for key, data in records.items())
    return len(records)


def test_records_are_there_while_they_are_written_and_after_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path / "a")
    store.save(KEYS[0], block(0))
    assert store.has(KEYS[0])
    assert not store.has(KEYS[1])
    assert check(store) == 1
    store.close()
    assert check(open_store(tmp_path / "a")) == 1
    assert check(open_store(fill(tmp_path / "b").parent)) == len(KEYS)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o077 == 0 for file in (tmp_path / "a").iterdir())


def test_records_of_one_load_are_an_array_without_a_copy(tmp_path: Path) -> None:
    fill(tmp_path / "a")
    records = open_store(tmp_path / "a").load(KEYS).wait(10)
    rows = [opened(key, record, BLOCK) for key, record in zip(KEYS, records or (), strict=True)]  # type: ignore[arg-type]
    wanted = np.stack([block(i) for i in range(len(KEYS))])
    for chosen in ([0, 1, 2, 3], [0, 2, 4], [3], [1, 1], [0, 1, 3], [2, 1]):
        array = as_one([rows[i] for i in chosen])  # type: ignore[misc]
        assert (array == wanted[chosen]).all()
        assert np.shares_memory(array, rows[chosen[0]]) == (chosen in ([0, 1, 2, 3], [0, 2, 4], [1, 1]))  # type: ignore[arg-type]
    assert not np.shares_memory(as_one([block(0), block(0)]), block(0))


def test_a_discarded_record_does_not_come_back(tmp_path: Path) -> None:
    fill(tmp_path / "a")
    store = open_store(tmp_path / "a")
    store.discard(KEYS[2])
    assert not store.has(KEYS[2])
    store.close()
    again = open_store(tmp_path / "a")
    assert not again.has(KEYS[2])
    assert check(again) == len(KEYS) - 1
    again.save(KEYS[2], block(2))
    again.close()
    assert check(open_store(tmp_path / "a")) == len(KEYS)


def test_a_record_that_is_discarded_in_the_queue_is_not_written_behind_its_note(tmp_path: Path) -> None:
    store = open_store(tmp_path / "a")
    with store._scanning:  # the writer waits
        for i in range(2):
            store.save(KEYS[i], block(i))
        store.discard(KEYS[1])
        assert not store.has(KEYS[1])
        store.pin([KEYS[2]], 60)
        store.save(KEYS[2], block(2))  # is written before those that came first
    store.close()
    again = open_store(tmp_path / "a")
    assert [again.has(key) for key in KEYS[:3]] == [True, False, True]


def test_any_byte_of_a_segment_may_be_wrong(tmp_path: Path) -> None:
    segment = fill(tmp_path / "a")
    content = segment.read_bytes()
    for i in range(len(content)):
        segment.write_bytes(content[:i] + bytes([content[i] ^ 1 << i % 8]) + content[i + 1 :])
        store = open_store(tmp_path / "a")
        assert check(store) < len(KEYS)
        store.close()


def test_a_segment_may_end_anywhere_and_more_is_kept_behind_it(tmp_path: Path) -> None:
    segment = fill(tmp_path / "a")
    content = segment.read_bytes()
    counts = []
    for i in range(len(content)):
        segment.write_bytes(content[:i])
        store = open_store(tmp_path / "a")
        counts.append(check(store))
        if i % 37 == 0:
            for j, key in enumerate(KEYS):
                store.save(key, block(j))
            store.close()
            assert check(open_store(tmp_path / "a")) == len(KEYS)
            for other in tmp_path.glob("a/*.octkv"):
                if other != segment:
                    other.unlink()
        store.close()
    assert counts == sorted(counts)
    assert counts[-1] == len(KEYS) - 1


def test_a_fuzzed_segment_gives_right_records_or_none(tmp_path: Path) -> None:
    segment, rng = fill(tmp_path / "a"), random.Random(0)
    content = segment.read_bytes()
    for _ in range(300):
        data = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            start, count = rng.randrange(len(data)), rng.randint(0, 60)
            data[start : start + count] = rng.choice([rng.randbytes(count), b"", content[:count], b"\xff" * count])
        segment.write_bytes(data)
        store = open_store(tmp_path / "a")
        check(store)
        store.close()


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    folder = fill(tmp_path / "a").parent
    (folder / "notes.txt").write_text("mine")
    (folder / "00000001.octkv").write_bytes(b"no segment" * 100)
    (folder / "00000002.octkv").mkdir()
    (folder / "00000003.octkv").symlink_to("/etc/passwd")
    os.mkfifo(folder / "00000004.octkv")
    other = DiskStore(tmp_path / "b", bytes(32), 1 << 20)
    other.save(KEYS[0], block(9))  # under the same key, of another model
    other.close()
    (tmp_path / "b" / "00000000.octkv").rename(folder / "00000005.octkv")
    store = open_store(folder)
    assert check(store) == len(KEYS)
    store.save(b"x" * 32, block(7))
    store.close()
    assert open_store(folder).has(b"x" * 32)
    assert (folder / "notes.txt").read_text() == "mine"


def test_the_oldest_segments_give_way(tmp_path: Path) -> None:
    limit = 16 << 10
    store, keys = open_store(tmp_path / "a", limit), [i.to_bytes(32, "big") for i in range(100)]
    for i, key in enumerate(keys):
        store.save(key, block(i, 500))
        store.flush()
        assert sum(file.stat().st_size for file in tmp_path.glob("a/*.octkv")) <= limit
    kept = [store.has(key) for key in keys]
    assert kept == sorted(kept)
    assert 12 < sum(kept) < 30
    store.close()
    again = open_store(tmp_path / "a", limit)
    assert [again.has(key) for key in keys] == kept
    again.save(b"y" * 32, block(0, 5000))  # larger than a segment
    again.flush()
    assert not again.has(b"y" * 32)


def test_what_was_used_outlives_its_segment(tmp_path: Path) -> None:
    limit = 16 << 10
    store, keys = open_store(tmp_path / "a", limit), [i.to_bytes(32, "big") for i in range(100)]
    for i, key in enumerate(keys):
        store.save(key, block(i, 500))
        store.flush()
        if i < 50:
            store.touch(keys[1:3])
        assert sum(file.stat().st_size for file in tmp_path.glob("a/*.octkv")) <= limit
        if 30 < i < 50:
            assert [store.has(each) for each in keys[:4]] == [False, True, True, False]
    assert not store.has(keys[1])  # it was used no more
    records = store.load(keys[-3:]).wait(10)
    assert records is not None
    for i, record in zip(range(97, 100), records, strict=True):
        assert record is not None
        assert (opened(keys[i], record, 500) == block(i, 500)).all()
    for i, key in enumerate(keys[:40]):  # loading is a use, too
        store.save(key, block(i, 500))
        store.load(keys[-1:]).wait(10)
        store.flush()
    assert store.has(keys[-1])
    assert not store.has(keys[-4])
    for key in keys:  # if all are used, half of a segment goes on
        store.touch(keys)
        store.save(key, block(keys.index(key), 500))
    store.close()
    again = open_store(tmp_path / "a", limit)
    assert sum(again.has(key) for key in keys) > 12


def test_one_process_writes_and_others_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = open_store(tmp_path / "a"), open_store(tmp_path / "a")
    first.save(KEYS[0], block(0))
    first.flush()
    second.save(KEYS[1], block(1))
    second.flush()
    monkeypatch.setattr(disk_store, "_REFRESH_S", -1.0)
    second.has(KEYS[0])  # begins to look for it
    second.load([]).wait(10)
    assert second.has(KEYS[0])
    assert not second.has(KEYS[1])
    assert check(second) == 1
    first.close()
    second.save(KEYS[1], block(1))  # now it is the writer
    second.close()
    [_] = tmp_path.glob("a/*.octkv")
    assert check(open_store(tmp_path / "a")) == 2


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_takes_no_more_costs_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    segment = fill(tmp_path / "a")
    content = segment.read_bytes()
    write, opens = os.pwritev, os.open

    def full(file: int, pieces: Sequence[memoryview], offset: int) -> int:
        if sum(map(len, pieces)) < 60:
            raise OSError(code, os.strerror(code))
        return write(file, [b"".join(pieces)[:50]], offset)

    def read_only(path: Path, flags: int, *args: int) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(code, os.strerror(code))
        return opens(path, flags, *args)

    monkeypatch.setattr(os, "open" if code == errno.EROFS else "pwritev", read_only if code == errno.EROFS else full)
    store = open_store(tmp_path / "a")
    for i in range(6, 12):
        store.save(bytes([i]) * 32, block(i))
    store.flush()
    assert check(store) == len(KEYS)
    assert not store.has(bytes([6]) * 32)
    assert caplog.text.count("no more prompts are kept") == 1
    assert os.strerror(code) in caplog.text
    store.close()
    assert segment.read_bytes() == content


def test_a_folder_of_others_or_none_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    identity = CacheIdentity(b"model", b"layout")
    store = open_disk_store(tmp_path, identity, 1 << 20, "tiny")
    assert store is not None
    store.close()
    [folder] = tmp_path.iterdir()
    folder.chmod(0o777)
    assert open_disk_store(tmp_path, identity, 1 << 20, "tiny") is None
    assert "other users may write to it" in caplog.text
    (tmp_path / "file").write_text("")
    assert open_disk_store(tmp_path / "file", identity, 1 << 20, "tiny") is None


@pytest.mark.parametrize(("at_once", "expected"), [(1, [0.25, 0.5, 0.75, 1.0]), (2, [0.5, 1.0]), (9, [1.0])])
def test_a_writer_pauses_beside_decoding_but_not_if_the_queue_fills_or_somebody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int, expected: list[float]
) -> None:
    """Each turn of writes takes 10 ms of a clock that the test moves; the writer may use a hundredth of a core."""
    clock, pauses = iter(i * 0.01 for i in range(1000)), []
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    monkeypatch.setattr(disk_store, "_MAX_QUEUED_BYTES", 4 * BLOCK)
    monkeypatch.setattr(disk_store, "_WRITTEN_AT_ONCE", at_once * BLOCK)
    store, may_write = open_store(tmp_path / "a"), threading.Event()
    store._writing.submit(may_write.wait)
    monkeypatch.setattr(store._is_hurried, "wait", pauses.append)
    for i in range(4):
        assert store.save(KEYS[i], block(i))
    may_write.set()
    store.flush()
    assert pauses == pytest.approx(expected)
    monkeypatch.undo()
    store.save(KEYS[4], block(4))
    store.close()  # ends the pause
    assert len(found(open_store(tmp_path / "a"))) == 5


_ENDING = """
import sys
import numpy as np
from pathlib import Path
from octavo.engine.kv import disk_store
disk_store._WRITING_SHARE = 1e-9
store = disk_store.DiskStore(Path(sys.argv[1]), bytes(range(32)), 1 << 30)
for i in range(20):
    store.save(i.to_bytes(32, "big"), np.full(20_000, i, np.uint8))
"""


def test_a_program_that_ends_without_close_writes_all_without_pauses(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _ENDING, tmp_path / "a"], check=True, timeout=60)
    store = open_store(tmp_path / "a", 1 << 30)
    assert all(store.has(i.to_bytes(32, "big")) for i in range(20))


def test_heads_are_what_they_were() -> None:
    head = SegmentHead(IDENTITY, "é" * 200)
    assert SegmentHead.read(head.content) == SegmentHead(IDENTITY, "é" * 100)
    assert RecordHead.read(RecordHead(b"k" * 38, 7, True).content) == RecordHead(b"k" * 38, 7, True)
    assert RecordHead.read(b"") is None


_WRITER = """
import sys
import numpy as np
from pathlib import Path
from octavo.engine.kv.disk_store import DiskStore
store = DiskStore(Path(sys.argv[1]), bytes(range(32)), 1 << 30)
for i in range(10**6):
    store.save(i.to_bytes(32, "big"), np.full(20_000, i % 251, np.uint8))
    if i % 50 == 0:
        store.flush()
        print(i, flush=True)
"""


def test_a_writer_that_is_killed_leaves_what_it_had_written(tmp_path: Path) -> None:
    for _ in range(2):  # the second goes on where the first was
        with subprocess.Popen([sys.executable, "-c", _WRITER, tmp_path / "a"], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            for _ in range(3):
                last = int(writer.stdout.readline())
            writer.send_signal(signal.SIGKILL)
        store, keys = open_store(tmp_path / "a", 1 << 30), [i.to_bytes(32, "big") for i in range(last + 1)]
        assert all(store.has(key) for key in keys)
        records = store.load(keys).wait(60)
        assert records is not None
        for i, (key, record) in enumerate(zip(keys, records, strict=True)):
            assert record is not None
            data = opened(key, record, 20_000)
            assert data is not None
            assert (data == i % 251).all()
        store.save(b"z" * 32, block(0))
        store.close()
        assert open_store(tmp_path / "a", 1 << 30).has(b"z" * 32)


def test_another_process_reads_while_one_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_store, "_REFRESH_S", -1.0)
    reader = open_store(tmp_path / "a", 1 << 30)
    with subprocess.Popen([sys.executable, "-c", _WRITER, tmp_path / "a"], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        try:
            for _ in range(4):
                last = int(writer.stdout.readline())
                key = last.to_bytes(32, "big")
                reader.has(key)  # begins to look for it
                reader.load([]).wait(10)
                assert reader.has(key)
                [record] = reader.load([key]).wait(10) or [None]
                assert record is not None
                data = opened(key, record, 20_000)
                assert data is not None
                assert (data == last % 251).all()
                reader.save(b"r" * 32, block(0))
                reader.flush()
                assert not reader.has(b"r" * 32)  # the other one holds the lock
            assert writer.poll() is None
        finally:
            writer.kill()
    reader.save(b"r" * 32, block(0))
    reader.close()
    assert open_store(tmp_path / "a", 1 << 30).has(b"r" * 32)
