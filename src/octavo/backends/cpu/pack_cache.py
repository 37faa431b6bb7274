"""Packed weights kept on disk, so that the next start maps them instead of packing.

There is one file per model, in a private folder beside the downloaded models. A file has no offsets, sizes or names
that the reader follows, only a key that must be the model's, the type and checksum of each matrix, and the matrices in
the model's order. The worst that a wrong file can do is to be refused. The key covers

- size and both time stamps of each of the model's files. The time of the last change (ctime) cannot be set back, so a
  file that was written to, replaced or copied has another;
- the name, type and size of each matrix, how it is made of stored tensors, and a page of their content, for systems
  whose time stamps lie;
- the layout version of the packed bytes, which is the same on all instruction sets.

The packed bytes are all checked, because they must be read into memory anyway. Reading the model itself would cost as
much as packing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import mmap
import os
import secrets
import stat
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octavo import env
from octavo.backends import PackCacheOptions
from octavo.backends.cpu import _native

logger = logging.getLogger(__name__)

_MAGIC = b"octavo packed 3\n"
_ENTRY = struct.Struct("<QQ")  # index among the possible packed types, checksum of the packed bytes
_SUFFIX = ".packed"
_ALIGNMENT = 4096

Packed = Iterator[_native.PackedWeight]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix [n, k] of a model before packing.

    packed_types: its possible types after packing. fingerprint: identifies its type, its content and the way it is made
    of stored tensors.
    """

    name: str
    packed_types: tuple[str, ...]
    n: int
    k: int
    fingerprint: bytes


class _WrongFileError(Exception):
    """A cache file cannot be used, for the reason in the message."""


class PackCache:
    """The file of one model's packed weights. Problems with it are logged and never prevent a start."""

    def __init__(self, options: PackCacheOptions, matrices: Sequence[Matrix]) -> None:
        self._limit_bytes = options.limit_bytes
        self._matrices = matrices
        self._key = _key(options.identity, matrices)
        self._header_bytes = len(self._key) + len(matrices) * _ENTRY.size
        self._stem = self._key[len(_MAGIC) :].hex()[:32]
        self._name = self._stem + _SUFFIX
        self.path = env.pack_cache_dir() / self._name

    def load(self, num_threads: int, reported: Callable[[Packed], Packed]) -> list[_native.PackedWeight] | None:
        """The mapped packed weights in the model's order; None if they are missing or damaged.

        reported: passes them on, one after another, as they are checked.
        """
        flags = os.O_RDONLY | os.O_NONBLOCK
        try:
            with _open_folder(self.path.parent) as folder, _opened(self._name, flags, folder) as file:
                try:
                    packed = self._map(file, num_threads, reported)
                except _WrongFileError as reason:
                    logger.warning("%s: %s; it is removed and the weights are packed anew", self.path, reason)
                    with contextlib.suppress(OSError):
                        os.unlink(self._name, dir_fd=folder)
                    return None
                with contextlib.suppress(OSError):  # a read-only folder keeps no order of use
                    os.utime(file)
                return packed
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("%s: %s; the weights are packed anew", self.path, error.strerror or error)
            return None

    def store(self, packed: Packed) -> bool:
        """Makes room for the file and writes it, completely or not at all. False: it could not be kept.

        packed: the matrices in the model's order. Each is taken after the one before is written; none is taken if the
        file cannot be kept.
        """
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _open_folder(self.path.parent) as folder:
                return self._store(folder, packed)
        except OSError as error:
            logger.warning("%s: the packed weights cannot be kept: %s", self.path, error.strerror or error)
            return False

    def _map(self, file: int, num_threads: int, reported: Callable[[Packed], Packed]) -> list[_native.PackedWeight]:
        status = os.fstat(file)
        _check_private(status)
        if not stat.S_ISREG(status.st_mode):
            raise _WrongFileError("not a regular file")
        entries = self._read_header(os.pread(file, self._header_bytes, 0))
        offsets, size = self._places([type_name for type_name, _ in entries])
        if status.st_size != size:
            raise _WrongFileError(f"it has {status.st_size} bytes, must have {size}")
        mapped = np.frombuffer(mmap.mmap(file, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ), np.uint8)
        guard = _native.MappingGuard(mapped, str(self.path))

        def view(index: int) -> _native.PackedWeight:
            (type_name, checksum), matrix, begin = entries[index], self._matrices[index], offsets[index]
            panels = mapped[begin : begin + _native.packed_nbytes(type_name, matrix.n, matrix.k)]
            if _native.checksum(panels) != checksum:
                raise _WrongFileError(f"the bytes of {matrix.name} are damaged")
            return _native.view_packed(type_name, panels, matrix.n, matrix.k, guard)

        with ThreadPoolExecutor(num_threads, "octavo-check") as executor:
            return list(reported(executor.map(view, range(len(entries)))))

    def _store(self, folder: int, packed: Packed) -> bool:
        _, size = self._places([matrix.packed_types[0] for matrix in self._matrices])
        if size > self._limit_bytes:
            logger.warning(
                "%s: the packed weights take %d MB, more than pack_cache_size allows (%d MB): not kept",
                self.path, size // 10**6, self._limit_bytes // 10**6,
            )  # fmt: skip
            return False
        if _remove_dead_files(folder, self._stem):
            logger.info("%s: another process is writing it", self.path)
            return False
        _make_room(folder, self._limit_bytes - size, self._name)
        draft = f".{self._stem}-{secrets.token_hex(8)}.draft"
        with _opened(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, folder) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)  # tells others that its writer lives
                os.posix_fallocate(file, 0, size)  # a full disk is noticed before anything is written
                size = self._write(file, packed)
                os.fsync(file)
                os.rename(draft, self._name, src_dir_fd=folder, dst_dir_fd=folder)
                os.fsync(folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(draft, dir_fd=folder)
                raise
        logger.info("%s: packed weights kept for the next start, %d MB", self.path, size // 10**6)
        return True

    def _write(self, file: int, packed: Packed) -> int:
        """Writes one matrix after another, then the header. Returns the size of the file."""
        entries = []
        with open(file, "wb", closefd=False) as out:
            out.seek(_padded(self._header_bytes))
            for matrix, weight in zip(self._matrices, packed, strict=True):
                out.write(weight.panels.data)
                kind = matrix.packed_types.index(weight.type_name)
                entries.append(_ENTRY.pack(kind, _native.checksum(weight.panels)))
                out.seek(_padded(out.tell()))
            end = out.tell()
            out.seek(0)
            out.write(b"".join([self._key, *entries]))
        # A matrix whose numbers need its wider type makes the file longer than was thought.
        os.ftruncate(file, end)
        if end > self._limit_bytes:
            raise OSError(errno.EFBIG, f"they take {end // 10**6} MB, more than pack_cache_size allows")
        return end

    def _read_header(self, header: bytes) -> list[tuple[str, int]]:
        """Packed type and checksum of each matrix."""
        if len(header) != self._header_bytes or not header.startswith(self._key):
            raise _WrongFileError("not the packed weights of this model, or damaged")
        entries = []
        stored = _ENTRY.iter_unpack(header[len(self._key) :])
        for matrix, (kind, checksum) in zip(self._matrices, stored, strict=True):
            if kind >= len(matrix.packed_types):
                raise _WrongFileError(f"{matrix.name} has a type that it cannot have")
            entries.append((matrix.packed_types[kind], checksum))
        return entries

    def _places(self, packed_types: Sequence[str]) -> tuple[list[int], int]:
        """The offset of each matrix, on pages of its own, and the size of the file."""
        offsets, end = [], _padded(self._header_bytes)
        for type_name, matrix in zip(packed_types, self._matrices, strict=True):
            offsets.append(end)
            end += _padded(_native.packed_nbytes(type_name, matrix.n, matrix.k))
        return offsets, end


def _key(identity: str, matrices: Sequence[Matrix]) -> bytes:
    """The first bytes of a file of these matrices."""
    digest = hashlib.blake2b(f"{_native.PACK_LAYOUT_VERSION} {sys.byteorder} {identity}\n".encode(), digest_size=32)
    for matrix in matrices:
        digest.update(f"{matrix}\n".encode())
    return _MAGIC + digest.digest()


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


@contextlib.contextmanager
def _opened(name: str | Path, flags: int, folder: int | None = None) -> Iterator[int]:
    """A descriptor of a file in `folder`, only readable by its owner if it is new. Follows no symbolic link."""
    file = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o400, dir_fd=folder)
    try:
        yield file
    finally:
        os.close(file)


@contextlib.contextmanager
def _open_folder(path: Path) -> Iterator[int]:
    """A descriptor of the folder, for all further accesses. Raises OSError if others may write to it."""
    with _opened(path, os.O_RDONLY | os.O_DIRECTORY) as folder:
        try:
            _check_private(os.fstat(folder))
        except _WrongFileError as reason:
            remedy = f"chmod 700 {path}, or set OCTAVO_CACHE"
            raise PermissionError(0, f"the folder is not safe, {reason} ({remedy})") from None
        yield folder


def _check_private(status: os.stat_result) -> None:
    """Checks that no other user could have written the mapped file, or could write to it while it is in use."""
    if status.st_uid != os.geteuid():
        raise _WrongFileError(f"it belongs to user {status.st_uid}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _WrongFileError("others may write to it")


def _remove_dead_files(folder: int, stem: str) -> bool:
    """Removes drafts of dead writers. True if a living process is writing a draft of `stem`."""
    alive = False
    for name in os.listdir(folder):
        if not name.endswith(".draft"):
            continue
        with contextlib.suppress(OSError), _opened(name, os.O_RDONLY | os.O_NONBLOCK, folder) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(name, dir_fd=folder)
            except BlockingIOError:
                alive = alive or name.startswith(f".{stem}-")
    return alive


def _make_room(folder: int, left_bytes: int, own_name: str) -> None:
    """Removes the least recently used files until the others take at most `left_bytes`."""
    found = []
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if name.endswith(_SUFFIX) and name != own_name and stat.S_ISREG(status.st_mode):
                found.append((status.st_mtime_ns, name, status.st_size))
    total = sum(size for _, _, size in found)
    for _, name, size in sorted(found):
        if total <= left_bytes:
            break
        logger.info("%s: removed packed weights that were not used for longest, %d MB", name, size // 10**6)
        os.unlink(name, dir_fd=folder)
        total -= size
