"""The header of a GGUF file, versions 2 and 3: metadata and tensor directory, every size checked.

Source: the GGUF specification (`docs/gguf.md` of ggml). Layout, all little-endian: magic, version,
tensor count, key count; keys with typed values; for each tensor its name, dimensions (innermost
first), type and offset; then, at the next multiple of `general.alignment`, the data. Sizes are
Python integers, so nothing wraps; each read is checked against the end of the file before it is done.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from struct import Struct

import numpy as np

from octavo.errors import ModelLoadError
from octavo.loader.mapped_file import MappedFile
from octavo.loader.tensor_files import TensorInfo
from octavo.quantization.ggml import BLOCK_SIZES, GGML_TYPES

logger = logging.getLogger(__name__)

# Limits far above every published model, so that a hostile file costs neither time nor memory.
MAX_HEADER_BYTES = 32 << 20  # the largest have 12 MB, nearly all of it vocabulary
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_KEY_BYTES = (1 << 16) - 1
MAX_STRING_BYTES = 8 << 20
MAX_LISTED_STRING_BYTES = 1 << 16
MAX_LISTED_STRINGS = 1 << 20  # in all lists of a file together; the largest vocabularies with merges have 800,000
MAX_ARRAY_ITEMS = 1 << 21
MAX_TENSOR_NAME_BYTES = 63
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32

_U32 = Struct("<I")
_U64 = Struct("<Q")
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SMALLEST_KEY_BYTES = 8 + 1 + 4 + 1
_SMALLEST_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """The contents of one file before its data."""

    version: int
    metadata: Mapping[str, object]
    tensors: Mapping[str, TensorInfo]


def read_header(file: MappedFile) -> GGUFHeader:
    """Reads and checks the header of `file`. Raises ModelLoadError naming file, offset and reason."""
    return _HeaderReader(file).read()


class _HeaderReader:
    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.data = file.data
        self.size = file.size
        self.end = min(file.size, MAX_HEADER_BYTES)
        self.position = 0
        self.num_strings = 0

    def read(self) -> GGUFHeader:
        version = self._read_version()
        counts_at = self.position
        num_tensors = self._u64("the number of tensors")
        num_keys = self._u64("the number of keys")
        self._check_count("tensors", num_tensors, MAX_TENSORS, _SMALLEST_TENSOR_BYTES, counts_at)
        self._check_count("keys", num_keys, MAX_KEYS, _SMALLEST_KEY_BYTES, counts_at + 8)
        metadata: dict[str, object] = {}
        alignment = DEFAULT_ALIGNMENT
        for _ in range(num_keys):
            start = self.position
            key = self._key()
            if key in metadata:
                raise self._error(start, f"key {key!r:.80} appears twice")
            metadata[key] = self._value(key)
            if key == "general.alignment":
                alignment = self._alignment(metadata[key], start)
        return GGUFHeader(version, metadata, self._directory(num_tensors, alignment))

    def _error(self, offset: int, reason: str) -> ModelLoadError:
        return ModelLoadError(f"{self.file.path}: offset {offset}: {reason}")

    def _beyond(self, offset: int, nbytes: int, what: str) -> ModelLoadError:
        left = self.size - offset
        if nbytes > left:
            return self._error(offset, f"{what} takes {nbytes} bytes, but the file ends after {left}: truncated?")
        return self._error(offset, f"{what} goes beyond the first {MAX_HEADER_BYTES} bytes, the limit for a header")

    def _take(self, nbytes: int, what: str) -> int:
        """Skips the next `nbytes` bytes and returns their offset."""
        start = self.position
        if nbytes > self.end - start:
            raise self._beyond(start, nbytes, what)
        self.position = start + nbytes
        return start

    def _u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.data, self._take(4, what))[0])

    def _u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.data, self._take(8, what))[0])

    def _string(self, what: str, limit: int) -> str:
        length_at = self.position
        length = self._u64(f"the length of {what}")
        if length > limit:
            raise self._error(length_at, f"{what} has a length of {length} bytes, the limit is {limit}")
        start = self._take(length, what)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise self._error(start + error.start, f"{what} is not UTF-8") from error

    def _read_version(self) -> int:
        start = self._take(4, "the magic number")
        magic = self.data[start : start + 4]
        if magic != b"GGUF":
            hint = _what_it_is(magic, self.data[:8])
            raise self._error(start, f"not a GGUF file: it starts with {magic!r} instead of b'GGUF'{hint}")
        start = self.position
        version = self._u32("the version")
        if version in (2, 3):
            return version
        if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, 2, 3):
            raise self._error(start, "a big-endian GGUF file; convert the model to a little-endian one")
        raise self._error(start, f"GGUF version {version}; versions 2 and 3 are supported: convert the model again")

    def _check_count(self, what: str, count: int, limit: int, smallest: int, offset: int) -> None:
        room = (self.size - self.position) // smallest
        if count > min(limit, room):
            reason = f"the limit is {limit}" if limit <= room else f"the file has room for {room}"
            raise self._error(offset, f"{count} {what}, but {reason}")

    def _key(self) -> str:
        start = self.position
        key = self._string("a key", MAX_KEY_BYTES)
        if not key:
            raise self._error(start, "a key is empty")
        if "\0" in key:
            raise self._error(start, f"key {key!r:.80} contains a NUL byte")
        return key

    def _value(self, key: str) -> object:
        start = self.position
        kind = self._u32(f"the type of {key!r:.80}")
        if kind == _STRING:
            return self._string(f"the value of {key!r:.80}", MAX_STRING_BYTES)
        if kind == _ARRAY:
            return self._array(key)
        if kind == _BOOL:
            return self._bool(key)
        if kind not in _NUMBERS:
            raise self._error(start, f"key {key!r:.80} has the unknown type {kind}")
        dtype = np.dtype(_NUMBERS[kind])
        at = self._take(dtype.itemsize, f"the value of {key!r:.80}")
        return np.frombuffer(self.data, dtype, 1, at)[0].item()

    def _bool(self, key: str) -> bool:
        at = self._take(1, f"the value of {key!r:.80}")
        if self.data[at] > 1:
            raise self._error(at, f"key {key!r:.80} is a bool with the value {self.data[at]}")
        return bool(self.data[at])

    def _array(self, key: str) -> object:
        start = self.position
        kind = self._u32(f"the item type of {key!r:.80}")
        count = self._u64(f"the length of {key!r:.80}")
        if kind == _STRING:
            return self._strings(key, count, start + 4)
        if kind == _ARRAY:
            raise self._error(start, f"key {key!r:.80} is an array of arrays, which is not supported")
        if kind != _BOOL and kind not in _NUMBERS:
            raise self._error(start, f"key {key!r:.80} is an array of the unknown type {kind}")
        dtype = np.dtype(np.uint8 if kind == _BOOL else _NUMBERS[kind])
        self._check_count(f"items in {key!r:.80}", count, MAX_ARRAY_ITEMS, dtype.itemsize, start + 4)
        at = self._take(count * dtype.itemsize, f"the value of {key!r:.80}")
        # Copied: a view would keep the whole file mapped for as long as the metadata lives.
        items = np.frombuffer(self.data, dtype, count, at).copy()
        if kind != _BOOL:
            return items
        if count and items.max() > 1:
            raise self._error(at + int(items.argmax()), f"key {key!r:.80} holds a bool with the value {items.max()}")
        return items.astype(np.bool_)

    def _strings(self, key: str, count: int, offset: int) -> list[str]:
        """A list of strings. The loop is written for speed: vocabulary and merges have 300,000 of them."""
        self._check_count(f"strings in {key!r:.80}", count, MAX_LISTED_STRINGS - self.num_strings, 8, offset)
        self.num_strings += count
        data, last, unpack, limit = self.data, self.end, _U64.unpack_from, MAX_LISTED_STRING_BYTES
        strings: list[str] = []
        append = strings.append
        end = self.position
        try:
            for _ in range(count):
                start = end + 8
                if start > last:
                    raise self._beyond(end, 8, f"the length of string {len(strings)} of {key!r:.80}")
                (length,) = unpack(data, end)
                end = start + length
                if length > limit:
                    what = f"string {len(strings)} of {key!r:.80} has a length of {length} bytes"
                    raise self._error(start - 8, f"{what}, the limit is {limit}")
                if end > last:
                    raise self._beyond(start, length, f"string {len(strings)} of {key!r:.80}")
                append(data[start:end].decode())
        except UnicodeDecodeError as error:
            raise self._error(start + error.start, f"string {len(strings)} of {key!r:.80} is not UTF-8") from error
        self.position = end
        return strings

    def _alignment(self, value: object, offset: int) -> int:
        if type(value) is not int or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
            raise self._error(
                offset, f"general.alignment is {value!r:.80}; it must be a power of two from 8 to {MAX_ALIGNMENT}"
            )
        return value

    def _directory(self, num_tensors: int, alignment: int) -> dict[str, TensorInfo]:
        entries = [self._tensor(alignment) for _ in range(num_tensors)]
        data_start = -(-self.position // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for entry_at, info in entries:
            offset = data_start + info.offset
            if offset + info.nbytes > self.size:
                raise self._error(
                    entry_at,
                    f"tensor {info.name!r} lies at bytes {offset} to {offset + info.nbytes}, "
                    f"but the file has {self.size}: truncated?",
                )
            if info.name in tensors:
                raise self._error(entry_at, f"tensor {info.name!r} appears twice")
            tensors[info.name] = replace(info, offset=offset)
        self._check_layout(tensors, data_start, alignment)
        return tensors

    def _tensor(self, alignment: int) -> tuple[int, TensorInfo]:
        """One entry of the directory and its own offset. The tensor's offset is still relative to the data."""
        entry_at = self.position
        name = self._string("a tensor name", MAX_TENSOR_NAME_BYTES)
        if not name or "\0" in name:
            raise self._error(entry_at, f"tensor name {name!r:.80} is empty or contains a NUL byte")
        at = self.position
        num_dimensions = self._u32(f"the number of dimensions of {name!r:.80}")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._error(
                at, f"tensor {name!r:.80} has {num_dimensions} dimensions; 1 to {MAX_DIMENSIONS} are possible"
            )
        at = self.position
        shape = tuple(self._u64(f"a dimension of {name!r:.80}") for _ in range(num_dimensions))[::-1]
        if not all(0 < n < 1 << 63 for n in shape):
            raise self._error(at, f"tensor {name!r:.80} has the impossible shape {shape}")
        at = self.position
        type_id = self._u32(f"the type of {name!r:.80}")
        if type_id not in GGML_TYPES:
            raise self._error(
                at, f"tensor {name!r:.80} has type {type_id}, which is unknown or was removed from the format"
            )
        type_name = GGML_TYPES[type_id]
        values_per_block, bytes_per_block = BLOCK_SIZES[type_name]
        if shape[-1] % values_per_block:
            raise self._error(
                at,
                f"tensor {name!r:.80} of type {type_name} has rows of {shape[-1]} values, "
                f"which is not a multiple of {values_per_block}",
            )
        at = self.position
        offset = self._u64(f"the offset of {name!r:.80}")
        if offset % alignment:
            raise self._error(
                at, f"tensor {name!r:.80} lies at offset {offset}, which is not a multiple of {alignment}"
            )
        nbytes = prod(shape) // values_per_block * bytes_per_block
        return entry_at, TensorInfo(name, type_name, shape, self.file.path, offset, nbytes)

    def _check_layout(self, tensors: Mapping[str, TensorInfo], data_start: int, alignment: int) -> None:
        """Refuses overlapping tensors, and warns of bytes that belong to none."""
        end, before = data_start, ""
        for info in sorted(tensors.values(), key=lambda info: info.offset):
            if info.offset < end:
                raise self._error(info.offset, f"tensor {info.name!r} overlaps tensor {before!r}, which ends at {end}")
            if info.offset - end >= alignment:
                logger.warning("%s: bytes %d to %d belong to no tensor", self.file.path, end, info.offset)
            end, before = info.offset + info.nbytes, info.name


def _what_it_is(magic: bytes, start: bytes) -> str:
    if magic[:2] == b"PK" or magic[:1] == b"\x80":
        return " (a zip archive or a pickle; pickle checkpoints are not supported)"
    if magic == b"FUGG":
        return " (a byte-swapped file)"
    if magic in (b"ggml", b"fmgg", b"tjgg", b"lmgg"):
        return " (a format older than GGUF; convert the model again)"
    if start[4:8] == b"\0\0\0\0":
        return " (perhaps a safetensors file without its suffix)"
    return ""
