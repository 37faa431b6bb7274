"""The files for blocks kept on disk: a header and records. One process appends records while others read.

A segment and each of its records begin with a header that ends with its own digest. A record's content begins with a
digest of itself (`block_tier.sealed`).
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from octavo.platform import files

_MAGIC, _RECORD_MAGIC = b"OCTKV002", b"REC1"
_SEGMENT_HEAD = struct.Struct("<8s32s200s")  # magic, digest of the identity, label
_RECORD_HEAD = struct.Struct("<4sBB2x40sQ")  # magic, is gone, bytes of the key, key, bytes of the content
_DIGEST_BYTES = 16
SEGMENT_HEAD_BYTES = _SEGMENT_HEAD.size + _DIGEST_BYTES
RECORD_HEAD_BYTES = _RECORD_HEAD.size + _DIGEST_BYTES


class SegmentHead(NamedTuple):
    """The header of a segment.

    label: a description for users.
    """

    identity: bytes
    label: str

    @property
    def content(self) -> bytes:
        text = self.label.encode()[:200].decode(errors="ignore").encode()
        return _with_digest(_SEGMENT_HEAD.pack(_MAGIC, self.identity, text))

    @classmethod
    def read(cls, content: bytes) -> SegmentHead | None:
        """Parse a header, or return None if it is damaged or not a segment."""
        head = _without_digest(content, SEGMENT_HEAD_BYTES)
        if head is None or not head.startswith(_MAGIC):
            return None
        _, identity, label = _SEGMENT_HEAD.unpack(head)
        return cls(identity, label.rstrip(b"\0").decode(errors="replace"))


class RecordHead(NamedTuple):
    """The header of a record.

    num_bytes: size of its content.
    is_gone: earlier records of this key are void.
    """

    key: bytes
    num_bytes: int
    is_gone: bool = False

    @property
    def content(self) -> bytes:
        return _with_digest(_RECORD_HEAD.pack(_RECORD_MAGIC, self.is_gone, len(self.key), self.key, self.num_bytes))

    @classmethod
    def read(cls, content: bytes) -> RecordHead | None:
        """Parse a header, or return None if it is damaged or not a record."""
        head = _without_digest(content, RECORD_HEAD_BYTES)
        if head is None or not head.startswith(_RECORD_MAGIC):
            return None
        _, is_gone, key_bytes, key, num_bytes = _RECORD_HEAD.unpack(head)
        return cls(key[:key_bytes], num_bytes, bool(is_gone))


@dataclass(eq=False, slots=True)
class Segment:
    """An open segment.

    end: end of the known records.
    is_whole: it is readable, and nothing follows its records.
    The file is closed when the last reference to it is dropped, so that no thread reads from a closed file.
    """

    path: Path
    file: FileIO
    end: int = 0
    is_whole: bool = False
    head: SegmentHead | None = None

    @classmethod
    def open(cls, path: Path) -> Segment:
        """Open a segment. Raises OSError."""
        flags = os.O_RDONLY | files.O_NONBLOCK | files.O_NOFOLLOW | files.O_CLOEXEC
        return cls(path, FileIO(os.open(path, flags), "rb"))

    def new_records(self) -> Iterator[tuple[RecordHead, int]]:
        """Yield the records after `end`, each with the offset of its content. Raises OSError.

        Stops before a damaged or incomplete record; an incomplete one may be completed later.
        """
        file, status = self.file.fileno(), os.fstat(self.file.fileno())
        if not stat.S_ISREG(status.st_mode):
            return
        if self.head is None:
            self.head = SegmentHead.read(files.pread(file, SEGMENT_HEAD_BYTES, 0))
            self.end = SEGMENT_HEAD_BYTES
        while self.head is not None:
            head = RecordHead.read(files.pread(file, RECORD_HEAD_BYTES, self.end))
            if head is None or self.end + RECORD_HEAD_BYTES + head.num_bytes > status.st_size:
                break
            self.end += RECORD_HEAD_BYTES + head.num_bytes
            yield head, self.end - head.num_bytes
        self.is_whole = self.head is not None and self.end == status.st_size


def _with_digest(head: bytes) -> bytes:
    return head + hashlib.blake2b(head, digest_size=_DIGEST_BYTES).digest()


def _without_digest(content: bytes, num_bytes: int) -> bytes | None:
    head = content[:-_DIGEST_BYTES]
    return head if len(content) == num_bytes and _with_digest(head) == content else None
