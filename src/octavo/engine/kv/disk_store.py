"""Blocks in files: a store that outlives its process, in append-only segments that several processes can read.

A folder holds the segments of one `CacheIdentity`. One process at a time may write there; it holds a lock on the file
`writer.lock`. The index is built from the headers when the folder is opened. A damaged file costs only the records in
it.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from io import FileIO
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, TypeAlias

from octavo.backends.kept_files import WrongFileError, check_private
from octavo.engine.kv.block_tier import BlockRow, StoredRecord, digest_of, fresh_memory, sealed
from octavo.engine.kv.cache_identity import CacheIdentity
from octavo.engine.kv.segment import RECORD_HEAD_BYTES, SEGMENT_HEAD_BYTES, RecordHead, Segment, SegmentHead
from octavo.platform import files, locks

logger = logging.getLogger(__name__)

_MAX_SEGMENT_BYTES = 256 << 20
_SEGMENTS_AT_LIMIT = 4  # at least this many, so that removing the oldest loses only a part
_MAX_QUEUED_BYTES = 256 << 20  # waiting to be written; further records are not kept
_WRITING_SHARE = 0.01  # share of a core while the queue has room, so that decoding is not slowed
_WRITTEN_AT_ONCE = 4 << 20  # bytes, then a pause: each start of the writer disturbs the compute threads
_REFRESH_S = 1.0  # between two checks for records of another process
_LOCK = "writer.lock"
_NAME = re.compile(r"\d{8}\.octkv")


_Piece: TypeAlias = "bytes | memoryview"  # a piece of written data


class _Place(NamedTuple):
    segment: Segment
    offset: int
    num_bytes: int


class _ReadRecords(NamedTuple):
    records: list[StoredRecord]
    seconds: float


class DiskArrival:
    """Records that a thread is reading."""

    def __init__(self, reading: Future[_ReadRecords]) -> None:
        self._reading = reading

    @property
    def seconds(self) -> float:
        """See `Arrival`."""
        return self._reading.result().seconds

    def wait(self, timeout_s: float) -> list[StoredRecord] | None:
        """See `Arrival`."""
        wait([self._reading], timeout_s)
        return self._reading.result().records if self._reading.done() else None


class DiskStore:
    """A `BlockStore` in a folder. After a write error, which is logged once, nothing more is written.

    At the size limit, the oldest segment is deleted to make room for new records. Its records that have been used
    since they were written are appended again.
    """

    keeps_prompts = True
    keeps_private = False

    def __init__(self, folder: Path, identity: bytes, limit_bytes: int, label: str = "") -> None:
        """identity: 32 bytes.
        limit_bytes: total size of all segments.
        Raises OSError or WrongFileError.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(folder.stat())
        self._folder, self._limit = folder, limit_bytes
        self._head = SegmentHead(identity, label)
        self._max_segment = min(_MAX_SEGMENT_BYTES, limit_bytes // _SEGMENTS_AT_LIMIT)
        self._lock = threading.Lock()  # protects the fields below
        self._index: dict[bytes, _Place] = {}
        self._queued: dict[bytes, BlockRow] = {}
        self._num_queued_bytes = 0
        self._is_hurried = threading.Event()  # set while a caller waits until everything is written
        self._used: set[bytes] = set()  # used since they were written
        self._pinned: dict[bytes, float] = {}  # key -> end of the pin
        self._to_append: deque[tuple[bytes, _Place]] = deque()  # to be appended again, from removed segments
        self._scanning = threading.Lock()
        self._segments: dict[str, Segment] = {}
        self._refreshed_at = 0.0
        self._can_write, self._writer_lock = True, -1
        self._current: Segment | None = None  # the one that this process appends to
        self._writing = ThreadPoolExecutor(1, "octavo-kept-writer")
        self._reading = ThreadPoolExecutor(1, "octavo-kept-reader")
        self._helping = ThreadPoolExecutor(1, "octavo-kept-helper")  # reads half of each load
        # Without `close`, the program's exit first waits for the threads of executors.
        threading._register_atexit(self._is_hurried.set)  # type: ignore[attr-defined]
        self.refresh()

    # --- the engine's thread: nothing waits for the disk ---

    def has(self, key: bytes) -> bool:
        """See `BlockStore`. A background thread looks for other processes' records now and then."""
        with self._lock:
            if key in self._index or key in self._queued:
                return True
            if self._writer_lock < 0 and time.monotonic() - self._refreshed_at > _REFRESH_S:
                self._refreshed_at = time.monotonic()
                self._reading.submit(self.refresh)
        return False

    def load(self, keys: Sequence[bytes]) -> DiskArrival:
        """See `BlockStore`."""
        begun_at = time.monotonic()

        def read() -> _ReadRecords:
            return _ReadRecords(self._read(keys), time.monotonic() - begun_at)

        self.touch(keys)
        return DiskArrival(self._reading.submit(read))

    def save(self, key: bytes, data: BlockRow) -> bool:
        """See `BlockStore`."""
        with self._lock:
            is_known = key in self._index or key in self._queued
            if is_known or not self._can_write or self._num_queued_bytes + data.nbytes > _MAX_QUEUED_BYTES:
                return False
            self._queued[key] = data
            self._num_queued_bytes += data.nbytes
        self._writing.submit(self._write_next)
        return True

    def touch(self, keys: Iterable[bytes]) -> None:
        """See `BlockStore`."""
        with self._lock:
            self._used.update(key for key in keys if key in self._index)

    def pin(self, keys: Iterable[bytes], seconds: float) -> None:
        """See `BlockStore`."""
        now = time.monotonic()
        with self._lock:
            self._pinned = {key: until for key, until in self._pinned.items() if until > now}
            for key in keys:
                self._pinned[key] = max(self._pinned.get(key, 0.0), now + seconds)

    def discard(self, key: bytes) -> None:
        """See `BlockStore`. The record does not come back after a restart."""
        with self._lock:
            is_known = self._index.pop(key, None) is not None or self._unqueue(key, self._queued.get(key))
            self._used.discard(key)
        if is_known:
            self._writing.submit(self._write, key, None)

    def flush(self) -> None:
        """Wait until everything is written."""
        self._is_hurried.set()
        self._writing.submit(self._is_hurried.clear).result()

    def close(self) -> None:
        """Write the queued records, and release the folder so that another process may write there."""
        self._is_hurried.set()
        self._writing.shutdown()
        self._reading.shutdown()
        self._helping.shutdown()
        if self._writer_lock >= 0:
            os.close(self._writer_lock)
            self._writer_lock = -1

    # --- the other threads ---

    def refresh(self) -> None:
        """Find records that other processes have written since the last call. Never raises OSError."""
        with self._scanning:
            try:
                names = sorted(name for name in os.listdir(self._folder) if _NAME.fullmatch(name))
                for name in self._segments.keys() - names:
                    self._drop(self._segments.pop(name))
                for name in names:
                    self._scan(name)
            except OSError as error:
                logger.warning("%s: cannot read the kept prompts: %s", self._folder, error.strerror or error)

    def _scan(self, name: str) -> None:
        try:
            segment = self._segments.get(name) or Segment.open(self._folder / name)
            self._segments[name] = segment
            for head, offset in segment.new_records():
                if segment.head is None or segment.head.identity != self._head.identity:
                    segment.is_whole = False
                    return
                with self._lock:
                    if head.is_gone:
                        self._index.pop(head.key, None)
                        self._used.discard(head.key)
                    else:
                        self._index[head.key] = _Place(segment, offset, head.num_bytes)
        except OSError as error:
            logger.info("%s/%s: skipped: %s", self._folder, name, error.strerror or error)

    def _drop(self, segment: Segment) -> None:
        with self._lock:
            self._index = {key: place for key, place in self._index.items() if place.segment is not segment}
            self._used &= self._index.keys()

    def _read(self, keys: Sequence[bytes]) -> list[StoredRecord]:
        """Read records into one block of memory, except records that are still queued.

        A file that ends early yields a short record.
        """
        with self._lock:
            found = [(key, self._index.get(key), self._queued.get(key)) for key in keys]
        left = fresh_memory(sum(place.num_bytes for _, place, _ in found if place is not None)).data
        records: list[StoredRecord] = []
        jobs: list[tuple[int, _Place, memoryview]] = []
        for i, (key, place, data) in enumerate(found):
            records.append(None if data is None else sealed(key, data))
            if place is not None:
                jobs.append((i, place, left[: place.num_bytes]))
                left = left[place.num_bytes :]

        def read(some: list[tuple[int, _Place, memoryview]]) -> None:
            for i, place, record in some:
                count = files.read_into(place.segment.file.fileno(), record, place.offset)
                records[i] = record.toreadonly()[:count]

        # Clearing the new pages of memory takes longer than copying into them.
        half = self._helping.submit(read, jobs[len(jobs) // 2 :])
        read(jobs[: len(jobs) // 2])
        half.result()
        return records

    def _write_next(self) -> None:
        """Write some of the queued records, then pause."""
        begun_at, num_bytes = time.thread_time(), 0
        while num_bytes < _WRITTEN_AT_ONCE and (first := self._first_queued()) is not None:
            self._write(*first)
            num_bytes += first[1].nbytes
        if num_bytes:  # otherwise earlier calls have written everything
            room = 1.0 - self._num_queued_bytes / _MAX_QUEUED_BYTES
            self._is_hurried.wait((time.thread_time() - begun_at) / _WRITING_SHARE * room)

    def _first_queued(self) -> tuple[bytes, BlockRow] | None:
        """Return the first pinned record in the queue, or the first record if none is pinned."""
        with self._lock:
            pinned = next((key for key in self._queued if key in self._pinned), None) if self._pinned else None
            key = next(iter(self._queued), None) if pinned is None else pinned
            return None if key is None else (key, self._queued[key])

    def _unqueue(self, key: bytes, data: BlockRow | None) -> bool:
        """Remove a record from the queue if it has these bytes. Call it with the lock held."""
        if data is None or self._queued.get(key) is not data:
            return False
        del self._queued[key]
        self._num_queued_bytes -= data.nbytes
        return True

    def _write(self, key: bytes, data: BlockRow | None) -> None:
        """Append a record. If data is None, append a note that the key's earlier records are void."""
        try:
            if self._can_write and self._may_write():
                pieces: list[_Piece] = [] if data is None else [digest_of(key, data.data), data.data]
                self._append(key, pieces, is_gone=data is None)
        except OSError as error:
            self._can_write = False
            logger.warning(
                "%s: no more prompts are kept: %s; the answers stay the same", self._folder, error.strerror or error
            )
        finally:
            with self._lock:
                self._unqueue(key, data)  # unless it was discarded meanwhile

    def _may_write(self) -> bool:
        """True if this process is the writer. Raises OSError if the folder is read-only."""
        if self._writer_lock >= 0:
            return True
        file = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | files.O_NOFOLLOW | files.O_CLOEXEC, 0o600)
        try:
            locks.lock_now(file)
        except BlockingIOError:
            os.close(file)
            return False
        self.refresh()  # read what the last writer has written
        self._writer_lock = file
        return True

    def _append(self, key: bytes, content: Sequence[_Piece], *, is_gone: bool) -> None:
        size = RECORD_HEAD_BYTES + sum(map(len, content))
        if size + SEGMENT_HEAD_BYTES > self._max_segment:
            raise OSError(errno.EFBIG, f"a block takes {size} bytes; raise prompt_cache_size")
        with self._scanning:
            self._append_record(key, content, is_gone=is_gone)
            while self._to_append:
                old_key, place = self._to_append.popleft()
                record = files.pread(place.segment.file.fileno(), place.num_bytes, place.offset)
                self._append_record(old_key, [record], is_gone=False)

    def _append_record(self, key: bytes, content: Sequence[_Piece], *, is_gone: bool) -> None:
        num_bytes = sum(map(len, content))
        segment = self._segment_for(RECORD_HEAD_BYTES + num_bytes)
        start = segment.end
        _write_at(segment, RecordHead(key, num_bytes, is_gone).content, *content)
        segment.end += RECORD_HEAD_BYTES + num_bytes
        with self._lock:
            self._used.discard(key)
            if is_gone:
                self._index.pop(key, None)
            else:
                self._index[key] = _Place(segment, start + RECORD_HEAD_BYTES, num_bytes)

    def _segment_for(self, num_bytes: int) -> Segment:
        """Return the segment to append to: the last one if it is intact and has room, otherwise a new one."""
        last = self._segments[max(self._segments)] if self._segments else None
        if last is not None and last.end + num_bytes <= self._max_segment:
            if last is not self._current and _may_go_on(last, self._head):
                self._current = self._segments[last.path.name] = _writable(last)
                self._move(last, self._current)
                last = self._current
            if last is self._current:
                self._make_room(num_bytes)
                return last
        self._make_room(num_bytes + SEGMENT_HEAD_BYTES)
        taken = [name for name in os.listdir(self._folder) if _NAME.fullmatch(name)]
        path = self._folder / f"{int(max(taken)[:8]) + 1 if taken else 0:08}.octkv"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | files.O_CLOEXEC
        segment = Segment(path, FileIO(os.open(path, flags, 0o600), "r+b"), head=self._head)
        self._current = self._segments[path.name] = segment
        _write_at(segment, self._head.content)
        segment.end = SEGMENT_HEAD_BYTES
        return segment

    def _move(self, old: Segment, new: Segment) -> None:
        with self._lock:
            for key, place in self._index.items():
                if place.segment is old:
                    self._index[key] = place._replace(segment=new)

    def _make_room(self, num_bytes: int) -> None:
        """Remove the oldest segments until num_bytes more fit."""
        sizes = {name: os.fstat(each.file.fileno()).st_size for name, each in self._segments.items()}
        total = sum(sizes.values()) + num_bytes
        for name in sorted(sizes):
            segment = self._segments[name]
            if total <= self._limit or segment is self._current:
                break
            self._to_append += self._used_records(segment)
            segment.path.unlink(missing_ok=True)
            self._drop(self._segments.pop(name))
            total -= sizes[name]

    def _used_records(self, segment: Segment) -> list[tuple[bytes, _Place]]:
        """Return the records to keep from a segment that is being removed.

        Together they take at most half of its bytes, so that removal makes progress.
        """
        with self._lock:
            now, keys = time.monotonic(), self._used | (self._pinned.keys() & self._index.keys())
            used = [(key, self._index[key]) for key in keys if self._index[key].segment is segment]
            used.sort(key=lambda each: self._pinned.get(each[0], 0.0) <= now)
        sizes = accumulate(place.num_bytes + RECORD_HEAD_BYTES for _, place in used)
        return [each for each, size in zip(used, sizes, strict=True) if size <= segment.end // 2]


def open_disk_store(root: Path, identity: CacheIdentity, limit_bytes: int, label: str) -> DiskStore | None:
    """Return the store of a model, in its own folder below `root`. If that fails, log a warning and return None."""
    folder = root / identity.root().hex()[:32]
    try:
        return DiskStore(folder, identity.root(), limit_bytes, label)
    except (OSError, WrongFileError) as error:
        logger.warning("%s: prompts are not kept: %s", folder, getattr(error, "strerror", None) or error)
        return None


def _may_go_on(segment: Segment, head: SegmentHead) -> bool:
    return segment.is_whole and segment.head is not None and segment.head.identity == head.identity


def _writable(segment: Segment) -> Segment:
    file = FileIO(os.open(segment.path, os.O_RDWR | files.O_NOFOLLOW | files.O_CLOEXEC), "r+b")
    return Segment(segment.path, file, segment.end, is_whole=True, head=segment.head)


def _write_at(segment: Segment, *content: _Piece) -> None:
    """Append to a segment, or raise OSError and leave the segment unchanged."""
    file, left, end = segment.file.fileno(), deque(memoryview(each) for each in content), segment.end
    try:
        while left:
            count = files.write_pieces(file, left, end)
            end += count
            while left and count >= len(left[0]):
                count -= len(left.popleft())
            if count:
                left[0] = left[0][count:]
    except OSError:
        os.ftruncate(file, segment.end)
        raise


class KeptFolder(NamedTuple):
    """The segments of one identity.

    label: the model's label, empty if no segment is readable.
    """

    path: Path
    label: str
    num_bytes: int
    written_at: float

    @classmethod
    def all(cls, root: Path) -> list[KeptFolder]:
        """Return the folders below the root that have segments, most recently written first. Raises OSError."""
        folders = [cls._of(path, segments) for path in root.iterdir() if (segments := _segments_in(path))]
        return sorted(folders, key=lambda each: -each.written_at)

    @classmethod
    def _of(cls, path: Path, segments: list[Path]) -> KeptFolder:
        status: list[os.stat_result] = []
        label = ""
        for each in segments:
            with suppress(FileNotFoundError), each.open("rb") as file:  # a running model has removed it
                status.append(os.fstat(file.fileno()))
                head = SegmentHead.read(file.read(SEGMENT_HEAD_BYTES))
                label = label if head is None else head.label
        written_at = max((each.st_mtime for each in status), default=0.0)
        return cls(path, label, sum(each.st_size for each in status), written_at)

    def clear(self) -> bool:
        """Delete the segments. Return False, with nothing deleted, if a process is writing there. Raises OSError."""
        file = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | files.O_NOFOLLOW | files.O_CLOEXEC, 0o600)
        try:
            locks.lock_now(file)
            for segment in _segments_in(self.path):
                segment.unlink(missing_ok=True)
        except BlockingIOError:
            return False
        finally:
            os.close(file)
        return True


def _segments_in(folder: Path) -> list[Path]:
    if not re.fullmatch(r"[0-9a-f]{32}", folder.name) or folder.is_symlink() or not folder.is_dir():
        return []
    paths = (path for path in folder.iterdir() if _NAME.fullmatch(path.name))
    return sorted(path for path in paths if path.is_file() and not path.is_symlink())
