"""A reference's log-probabilities of a text, kept on disk so that many models can be compared with it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo import env
from octavo.batch import Float32, Int32
from octavo.engine.loading.progress_bar import size
from octavo.errors import OctavoError, UsageError
from octavo.loader.atomic_file import check_free_space, mapped_array, write_text
from octavo.quality.figures import PositionFigures, kl_divergence, log_softmax
from octavo.quality.scorer import TokenScores
from octavo.quality.windows import Window

_FORMAT = 1
_CHUNK_BYTES = 1 << 20
_ABANDONED_S = 86400
_FILES = ("logprobs.npy", "token_logprobs.npy", "top1.npy", "windows.json")


@dataclass(frozen=True, slots=True)
class ReferenceScores:
    """The log-probabilities after each position of the windows, for N counted tokens in all windows.

    log_probs: float16, mapped from a file; the rounding moves a KL divergence by about 1e-7.
    top1: the most likely tokens.
    """

    windows: list[Window]
    log_probs: NDArray[np.float16]  # [N, vocab]
    token_logprobs: Float32  # [N], of the token that follows, before rounding
    top1: Int32  # [N]

    def compare(self, scored: Iterable[tuple[Window, TokenScores]]) -> PositionFigures:
        """Compare a model's windows, scored with logits, with the reference's windows in the same order."""
        kl, same, logprobs = [], [], []
        row = 0
        for window, scores in scored:
            assert scores.logits is not None
            rows = slice(row, row + window.num_counted)
            row = rows.stop
            columns = min(self.log_probs.shape[1], scores.logits.shape[1])  # checkpoints differ in their padding
            logits = scores.logits[:, :columns]
            kl.append(kl_divergence(self.log_probs[rows, :columns], logits))
            same.append(logits.argmax(axis=1) == self.top1[rows])
            logprobs.append(scores.logprobs)
        return PositionFigures(
            np.concatenate(kl), np.concatenate(same), self.token_logprobs[:row], np.concatenate(logprobs)
        )


class ReferenceStore:
    """A folder of references. The least recently used ones are deleted when the total exceeds the limit."""

    def __init__(self, limit_bytes: int, folder: Path | None = None) -> None:
        """Use this folder.

        folder: None means `references` in Octavo's cache.
        """
        self._limit = limit_bytes
        self._folder = env.cache_dir() / "references" if folder is None else folder

    def find(self, key: str) -> ReferenceScores | None:
        """Return the reference with this key, or None if there is no complete one."""
        folder = self._folder / key
        try:
            described = json.loads((folder / "windows.json").read_text())
            arrays = [np.load(folder / name, mmap_mode="r", allow_pickle=False) for name in _FILES[:3]]
            windows = [Window(*entry) for entry in described["windows"]]
            os.utime(folder)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        num_rows = sum(window.num_counted for window in windows)
        if [len(array) for array in arrays] != [num_rows] * 3 or arrays[0].ndim != 2:
            return None
        return ReferenceScores(windows, arrays[0], np.array(arrays[1]), np.array(arrays[2]))

    def make(
        self, key: str, windows: Sequence[Window], vocab_size: int, scored: Iterator[tuple[Window, TokenScores]]
    ) -> ReferenceScores:
        """Write a reference from the scores of all windows, with logits.

        Raises UsageError if it exceeds the limit, and ModelWriteError if the disk is full.
        """
        num_rows = sum(window.num_counted for window in windows)
        num_bytes = 2 * num_rows * vocab_size
        if num_bytes > self._limit:
            raise UsageError(
                f"the reference's log-probabilities of {num_rows:,} positions take {size(num_bytes)} on disk, and the "
                f"limit is {size(self._limit)}: lower --tokens to {num_rows * self._limit // num_bytes // 2:,}, or "
                f"raise --reference-cache to {-(-num_bytes // 2**20)}MiB"
            )
        self._make_room(num_bytes)
        self._folder.mkdir(parents=True, exist_ok=True)
        check_free_space(self._folder, num_bytes)
        with _new_folder(self._folder, key) as folder:
            shape = (num_rows, vocab_size)
            kept = mapped_array(folder / _FILES[0], np.dtype(np.float16), shape)
            logprobs = mapped_array(folder / _FILES[1], np.dtype(np.float32), (num_rows,))
            top1 = mapped_array(folder / _FILES[2], np.dtype(np.int32), (num_rows,))
            row = 0
            for window, scores in scored:
                assert scores.logits is not None
                rows = slice(row, row + window.num_counted)
                row = rows.stop
                with np.errstate(over="ignore"):
                    kept[rows] = log_softmax(scores.logits)
                logprobs[rows], top1[rows] = scores.logprobs, scores.logits.argmax(axis=1)
            for array in (kept, logprobs, top1):
                array.flush()
            del kept, logprobs, top1, array
            entries = [[window.token_ids, window.first, window.start] for window in windows]
            write_text(folder / _FILES[3], json.dumps({"format": _FORMAT, "windows": entries}))
        made = self.find(key)
        if made is None:
            raise OctavoError(f"{self._folder / key} was removed while it was being written; run the command again")
        return made

    def _make_room(self, num_bytes: int) -> None:
        """Delete the least recently used references until `num_bytes` more fit within the limit.

        Another process may still be writing to folders whose names begin with a dot, so these are deleted only after a
        day.
        """
        for path in self._folder.glob(".new-*"):
            if path.stat().st_mtime < time.time() - _ABANDONED_S:
                shutil.rmtree(path, ignore_errors=True)
        found = (path for path in self._folder.glob("*") if not path.name.startswith("."))
        folders = [path for path in found if path.is_dir() and not path.is_symlink()]
        used = {path: _bytes_of(path) for path in sorted(folders, key=lambda path: path.stat().st_mtime)}
        total = sum(used.values())
        for path, taken in used.items():
            if total + num_bytes <= self._limit:
                break
            shutil.rmtree(path, ignore_errors=True)
            total -= taken


@contextlib.contextmanager
def _new_folder(parent: Path, name: str) -> Iterator[Path]:
    """Create a folder that gets its name only once it is complete."""
    folder = Path(tempfile.mkdtemp(prefix=".new-", dir=parent))
    try:
        yield folder
        shutil.rmtree(parent / name, ignore_errors=True)
        folder.rename(parent / name)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def reference_key(files: Iterable[Path], *facts: object, progress: Callable[[int, int], None] | None = None) -> str:
    """Return a name for the references of these file contents and facts: half of a SHA-256 in hexadecimal digits.

    progress: called with (bytes read, total bytes). A process reads unchanged files only once.
    """
    contents = _digest(sorted(files), progress)
    return hashlib.sha256(repr((_FORMAT, *facts)).encode() + contents).hexdigest()[:32]


def _digest(paths: Sequence[Path], progress: Callable[[int, int], None] | None) -> bytes:
    """Return the SHA-256 of the concatenated contents of these files."""
    found = [path.stat() for path in paths]
    state = tuple((path, each.st_ino, each.st_size, each.st_mtime_ns) for path, each in zip(paths, found, strict=True))
    if (known := _digests.get(state)) is not None:
        return known
    total, done = sum(each.st_size for each in found), 0
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(done, total)
    _digests[state] = digest.digest()
    return _digests[state]


_digests: dict[tuple[tuple[Path, int, int, int], ...], bytes] = {}  # computed by this process
