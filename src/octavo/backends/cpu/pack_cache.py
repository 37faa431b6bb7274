"""Packed weights kept on disk, so that the next start maps them instead of packing.

There is one file per model, in a private folder next to the downloaded models. A file contains no offsets, sizes or
names that the reader follows. It contains only a key that must match the model's, the type and checksum of each matrix,
and the matrices in the model's order. The worst that can happen with a wrong file is that it is refused. The key covers

- the size and both timestamps of each of the model's files. The time of the last change (ctime) cannot be set back, so
  a file that was written to, replaced or copied has a different one;
- the name, type and size of each matrix, how it is built from stored tensors, and a page of their content, for systems
  with unreliable timestamps;
- the layout version of the packed bytes, which is the same on all instruction sets.

All packed bytes are checked, because they must be read into memory anyway. Reading the model itself would cost as much
as packing.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain

import numpy as np

from octavo.backends import PackCacheOptions
from octavo.backends.cpu import _native
from octavo.backends.kept_files import KeptFile, WrongFileError, padded
from octavo.platform import files

_MAGIC = b"octavo packed 3\n"
_ENTRY = struct.Struct("<QQ")  # index among the possible packed types, checksum of the packed bytes
_PART_BYTES = 1 << 28  # checked before progress is reported: about a second of a slow disk

Packed = Iterator[_native.PackedWeight]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix [n, k] of a model before packing.

    packed_types: its possible types after packing.
    fingerprint: identifies its type, its content and how it is built from stored tensors.
    """

    name: str
    packed_types: tuple[str, ...]
    n: int
    k: int
    fingerprint: bytes


class PackCache:
    """The file of one model's packed weights. Problems with it are logged and never prevent a start."""

    def __init__(self, options: PackCacheOptions, matrices: Sequence[Matrix]) -> None:
        self._matrices = matrices
        self._key = _key(options.identity, matrices)
        self._header_bytes = len(self._key) + len(matrices) * _ENTRY.size
        self._file = KeptFile(self._key[len(_MAGIC) :], options.limit_bytes, in_background=options.later is not None)
        self.path = self._file.path

    def load(self, num_threads: int, reported: Callable[[Packed], Packed]) -> list[_native.PackedWeight] | None:
        """Return the mapped packed weights in the model's order, or None if they are missing or damaged.

        reported: passes the weights on one by one as they are checked.
        """
        return self._file.read(lambda file: self._map(file, num_threads, reported))

    def store(self, packed: Packed) -> bool:
        """Make room for the file and write it, completely or not at all. Return False if it could not be kept.

        packed: the matrices in the model's order. Each is taken after the previous one is written; none is taken if the
        file cannot be kept.
        """
        _, size = self._places([matrix.packed_types[0] for matrix in self._matrices])
        return self._file.write(size, lambda file: self._write(file, packed))

    def _map(self, file: int, num_threads: int, reported: Callable[[Packed], Packed]) -> list[_native.PackedWeight]:
        entries = self._read_header(files.pread(file, self._header_bytes, 0))
        offsets, size = self._places([type_name for type_name, _ in entries])
        if (found := os.fstat(file).st_size) != size:
            raise WrongFileError(f"it has {found} bytes instead of {size}")
        mapped = np.frombuffer(mmap.mmap(file, size, access=mmap.ACCESS_READ), np.uint8)
        guard = _native.MappingGuard(mapped, str(self.path))

        panels = [
            mapped[begin : begin + _native.packed_nbytes(type_name, matrix.n, matrix.k)]
            for (type_name, _), matrix, begin in zip(entries, self._matrices, offsets, strict=True)
        ]

        def checked(part: range) -> list[_native.PackedWeight]:
            views = []
            for i, checksum in zip(part, _native.checksums([panels[i] for i in part]), strict=True):
                type_name, matrix = entries[i][0], self._matrices[i]
                if checksum != entries[i][1]:
                    raise WrongFileError(f"the bytes of {matrix.name} are damaged")
                views.append(_native.view_packed(type_name, panels[i], matrix.n, matrix.k, guard))
            return views

        with ThreadPoolExecutor(num_threads, "octavo-check") as executor:
            parts = executor.map(checked, _parts([len(each) for each in panels], num_threads))
            return list(reported(chain.from_iterable(parts)))

    def _write(self, file: int, packed: Packed) -> int:
        """Write the matrices one after another, and then the header. Return the size of the file."""
        entries = []
        with open(file, "wb", closefd=False) as out:
            out.seek(padded(self._header_bytes))
            for matrix, weight in zip(self._matrices, packed, strict=True):
                out.write(weight.panels.data)
                kind = matrix.packed_types.index(weight.type_name)
                entries.append(_ENTRY.pack(kind, *_native.checksums([weight.panels])))
                out.seek(padded(out.tell()))
            end = out.tell()
            out.seek(0)
            out.write(b"".join([self._key, *entries]))
        return end  # beyond the planned size if a matrix's numbers need its wider type

    def _read_header(self, header: bytes) -> list[tuple[str, int]]:
        """Return the packed type and checksum of each matrix."""
        if len(header) != self._header_bytes or not header.startswith(self._key):
            raise WrongFileError("not the packed weights of this model, or damaged")
        entries = []
        stored = _ENTRY.iter_unpack(header[len(self._key) :])
        for matrix, (kind, checksum) in zip(self._matrices, stored, strict=True):
            if kind >= len(matrix.packed_types):
                raise WrongFileError(f"{matrix.name} has an impossible type")
            entries.append((matrix.packed_types[kind], checksum))
        return entries

    def _places(self, packed_types: Sequence[str]) -> tuple[list[int], int]:
        """Return the page-aligned offset of each matrix, and the size of the file."""
        offsets, end = [], padded(self._header_bytes)
        for type_name, matrix in zip(packed_types, self._matrices, strict=True):
            offsets.append(end)
            end += padded(_native.packed_nbytes(type_name, matrix.n, matrix.k))
        return offsets, end


def _parts(sizes: Sequence[int], num_threads: int) -> Iterator[range]:
    """Divide the matrices into parts that a thread checks in one go, because threads rarely get the GIL while the
    vocabulary is being built.
    """
    most = min(sum(sizes) // num_threads, _PART_BYTES)
    begin = nbytes = 0
    for i, size in enumerate(sizes):
        if i > begin and nbytes + size > most:
            yield range(begin, i)
            begin, nbytes = i, 0
        nbytes += size
    yield range(begin, len(sizes))


def _key(identity: str, matrices: Sequence[Matrix]) -> bytes:
    """Return the key with which a file of these matrices begins."""
    digest = hashlib.blake2b(f"{_native.PACK_LAYOUT_VERSION} {sys.byteorder} {identity}\n".encode(), digest_size=32)
    for matrix in matrices:
        digest.update(f"{matrix}\n".encode())
    return _MAGIC + digest.digest()
