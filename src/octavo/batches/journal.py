"""The output file of a batch, which is also its journal: a new run continues after the results already in it."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from octavo.batches.lines import LineResult, usage_of
from octavo.errors import UsageError
from octavo.platform import locks

_SYNC_S = 1.0


class Journal:
    """Appends results to the output. A second run of the same command finds them, and removes an incomplete last line.

    errors: the file for failed lines, or None to write them to the output too.
    retry_failed: discard earlier failures, so that their lines run again.
    ordered: write results in the order of the lines. Results that come early wait in memory.

    Use it as a context manager. Raises UsageError if a file cannot be used or contains something else.
    """

    def __init__(self, path: Path, errors: Path | None, *, retry_failed: bool = False, ordered: bool = False) -> None:
        self.num_completed = self.num_failed = 0  # including results of earlier runs
        self.usage: Counter[str] = Counter()  # tokens, by their names in the usage of a batch
        self._done: set[bytes] = set()  # the digests of ids
        if errors is not None and errors.resolve() == path.resolve():
            raise UsageError(f"{path} is both the output and the error file; give the errors their own file")
        self._output = self._open(path, retry_failed)
        try:
            self._errors = self._output if errors is None else self._open(errors, retry_failed)
        except BaseException:
            self._output.close()
            raise
        self._ordered = ordered
        self._early: dict[int, LineResult] = {}
        self._expected: list[int] = []  # numbers of the remaining lines, the last first
        self._thread = ThreadPoolExecutor(1, "octavo-journal")
        self._syncs: list[Future[None]] = []
        self._has_sync = False  # whether a scheduled flush will cover what is written now
        self._has_ended = threading.Event()

    def expect(self, numbers: list[int]) -> None:
        """Set the numbers of the remaining lines, in order, for `ordered`."""
        self._expected = numbers[::-1]

    def has(self, custom_id: str) -> bool:
        """True if the line already has a result."""
        return _digest(custom_id) in self._done

    def put(self, result: LineResult) -> None:
        if not self._ordered:
            self._write(result)
            return
        self._early[result.number] = result
        while self._expected and self._expected[-1] in self._early:
            self._write(self._early.pop(self._expected.pop()))

    def _sync(self) -> None:
        """Flush written results to disk, which may take a while."""
        self._has_sync = False  # later writes need another flush
        for file in {self._output, self._errors}:
            os.fsync(file.fileno())

    def _sync_soon(self) -> None:
        """Wait a second, or until the end, then flush everything written so far to disk."""
        self._has_ended.wait(_SYNC_S)
        self._sync()

    def end(self) -> None:
        """Flush everything to disk and close the files. Raises OSError if this or an earlier flush fails."""
        self._has_ended.set()
        try:
            self._thread.submit(self._sync).result()
            for sync in self._syncs:
                sync.result()
        finally:
            self._thread.shutdown()
            for file in {self._output, self._errors}:
                file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.end()

    def _write(self, result: LineResult) -> None:
        file = self._errors if result.is_failed else self._output
        file.write(result.record())
        self._note(result.custom_id, result.usage, is_failed=result.is_failed)
        file.flush()  # so that other processes see it and it survives this one
        while self._syncs and self._syncs[0].done():
            self._syncs.pop(0).result()  # raises
        if not self._has_sync:
            self._has_sync = True
            self._syncs.append(self._thread.submit(self._sync_soon))  # the next lines do not wait for it

    def _note(self, custom_id: str, usage: Mapping[str, int], *, is_failed: bool) -> None:
        self._done.add(_digest(custom_id))
        self.num_failed += is_failed
        self.num_completed += not is_failed
        if not is_failed:
            self.usage.update(usage)

    def _open(self, path: Path, retry_failed: bool) -> BinaryIO:
        """Open the file exclusively, read its results, and cut off an incomplete last line."""
        file = _locked(path)
        try:
            size, num_kept, num_lines = 0, 0, 0
            while (line := file.readline()).endswith(b"\n"):
                size, num_lines = size + len(line), num_lines + 1
                custom_id, is_failed, usage = _read_record(line, path)
                if is_failed and retry_failed:
                    continue
                num_kept += 1
                if not self.has(custom_id):
                    self._note(custom_id, usage, is_failed=is_failed)
            file.truncate(size)
            return file if num_kept == num_lines else _without_failed(file, path)
        except BaseException:
            file.close()
            raise


def _locked(path: Path) -> BinaryIO:
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent}: no such directory; create it first")
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is not a regular file; results need one, so that a batch can resume")
    try:
        file = path.open("a+b")
        locks.lock_now(file.fileno())
    except BlockingIOError:
        raise UsageError(
            f"{path} is being written by another batch; wait for it to end, or name another file"
        ) from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    file.seek(0)
    return file


def _read_record(line: bytes, path: Path) -> tuple[str, bool, Mapping[str, int]]:
    """Return a result's id, whether it failed, and the token counts of an answer."""
    try:
        record = json.loads(line)
        error, response = record["error"], record["response"]
        if error is not None:
            return str(record["custom_id"]), True, {}
        return str(record["custom_id"]), response["status_code"] != 200, usage_of(response["body"])
    except (ValueError, RecursionError, KeyError, TypeError):
        raise UsageError(f"{path} contains something other than batch results; name another file") from None


def _without_failed(file: BinaryIO, path: Path) -> BinaryIO:
    """Atomically replace the file with one without the failed lines, and return the new file."""
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    kept = _locked(partial)
    file.seek(0)
    kept.writelines(line for line in file if not _read_record(line, path)[1])
    kept.flush()
    os.fsync(kept.fileno())
    partial.replace(path)
    file.close()
    return kept


def _digest(custom_id: str) -> bytes:
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=12).digest()
