"""One prompt in a file: its tokens, followed by its blocks as records of a segment."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Container
from pathlib import Path
from typing import NamedTuple

import numpy as np

from octavo.engine.kv.block_tier import DIGEST_BYTES, BlockRow, opened, sealed
from octavo.engine.kv.segment import RecordHead, Segment, SegmentHead
from octavo.errors import UsageError
from octavo.platform import files

_PROMPT_KEY = b"prompt"
_PROMPT = struct.Struct("<?QQ")  # is private, tokens, blocks
_KEY_BYTES = 32


class KeptPrompt(NamedTuple):
    """The tokens of a prompt's full blocks, the blocks' keys in the first group of layers, and bytes by key.

    Some bytes may be missing.
    is_private: it belongs to a salt.
    """

    token_ids: list[int]
    hashes: list[bytes]
    data: dict[bytes, BlockRow]
    is_private: bool = False


def write_prompt_file(path: Path, identity: bytes, prompt: KeptPrompt) -> int:
    """Replace the file atomically and return its size in bytes. Raises UsageError if that is impossible."""
    head = _PROMPT.pack(prompt.is_private, len(prompt.token_ids), len(prompt.hashes))
    tokens = np.array(prompt.token_ids, "<i4").tobytes()
    first = np.frombuffer(head + tokens + b"".join(prompt.hashes), np.uint8)
    other = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(os.open(other, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | files.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(SegmentHead(identity, "one prompt").content)
            for key, data in ((_PROMPT_KEY, first), *prompt.data.items()):
                record = sealed(key, data)
                file.write(RecordHead(key, len(record)).content)
                file.write(record)
            num_bytes = file.tell()
        other.replace(path)
    except OSError as error:
        other.unlink(missing_ok=True)
        raise UsageError(f"{path}: the prompt cannot be saved: {error.strerror or error}", code="file_error") from error
    return num_bytes


def read_prompt_file(
    path: Path, identity: bytes, size_of: Callable[[bytes], int], is_wanted: Callable[[list[bytes]], Container[bytes]]
) -> tuple[KeptPrompt, int]:
    """Read the prompt in a file. Return it with the number of bytes read; damaged blocks are missing.

    size_of: returns the size of a block or of states by key.
    is_wanted: returns the keys to read, given the hashes of a prompt's blocks.
    Raises UsageError for another kind of file, or for one written with another model or other settings.
    """
    try:
        segment = Segment.open(path)
        with segment.file:
            return _read(path, segment, identity, size_of, is_wanted)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}", code="file_error") from error


def _read(
    path: Path,
    segment: Segment,
    identity: bytes,
    size_of: Callable[[bytes], int],
    is_wanted: Callable[[list[bytes]], Container[bytes]],
) -> tuple[KeptPrompt, int]:
    file, prompt, num_bytes = segment.file.fileno(), None, 0
    wanted: Container[bytes] = ()
    for head, offset in segment.new_records():
        if segment.head is None or segment.head.identity != identity:
            break
        if prompt is None:
            prompt = _opened_prompt(head, files.pread(file, head.num_bytes, offset))
            if prompt is None:
                break
            wanted, num_bytes = is_wanted(prompt.hashes), head.num_bytes
        elif head.key in wanted and head.num_bytes == size_of(head.key) + DIGEST_BYTES:
            data = opened(head.key, files.pread(file, head.num_bytes, offset), size_of(head.key))
            if data is not None:
                prompt.data[head.key] = data
                num_bytes += head.num_bytes
    if segment.head is None or segment.head.identity != identity:
        what = "was saved with a different model, setting or version"
        if segment.head is None:
            what = "is not a saved prompt, or comes from a different version"
        raise UsageError(f"{path}: {what}; delete it or name another file", code="invalid_value")
    if prompt is None:
        raise UsageError(f"{path}: the tokens are damaged; delete it", code="invalid_value")
    return prompt, num_bytes


def _opened_prompt(head: RecordHead, record: bytes) -> KeptPrompt | None:
    size = head.num_bytes - DIGEST_BYTES
    content = opened(_PROMPT_KEY, record, size) if head.key == _PROMPT_KEY else None
    if content is None or size < _PROMPT.size:
        return None
    is_private, num_tokens, num_blocks = _PROMPT.unpack(content[: _PROMPT.size].tobytes())
    if size != _PROMPT.size + 4 * num_tokens + _KEY_BYTES * num_blocks:
        return None
    keys_at = _PROMPT.size + 4 * num_tokens
    token_ids = np.frombuffer(content[_PROMPT.size : keys_at].tobytes(), "<i4").tolist()
    keys = content[keys_at:].tobytes()
    return KeptPrompt(token_ids, [keys[i : i + _KEY_BYTES] for i in range(0, len(keys), _KEY_BYTES)], {}, is_private)
