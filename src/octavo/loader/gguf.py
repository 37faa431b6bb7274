"""Opens GGUF models, versions 2 and 3, from one file or from all parts of a split model.

Files are mapped, and every size is checked first.

Source: the GGUF specification (`docs/gguf.md` of ggml). Layout, all little-endian: magic, version, tensor count, key
count; keys with typed values; for each tensor its name, dimensions (innermost first), type and offset; then, at the
next multiple of `general.alignment`, the data. Sizes are Python integers, so nothing wraps; each read is checked
against the end of the file before it is done.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from math import prod
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelLoadError
from octavo.loader.mapped_file import MappedFile
from octavo.loader.tensor_files import TensorFiles, TensorInfo, check_layout
from octavo.quantization.ggml import BLOCK_SIZES, GGML_TYPES

logger = logging.getLogger(__name__)

# Limits far above every published model, so that a hostile file costs neither time nor memory.
MAX_PARTS = 1000
MAX_HEADER_BYTES = 32 << 20  # the largest have 12 MB, nearly all of it vocabulary
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_KEY_BYTES = (1 << 16) - 1
MAX_STRING_BYTES = 8 << 20
MAX_LISTED_STRING_BYTES = 1 << 16
MAX_LISTED_STRINGS = 1 << 20  # over all lists of a file; the largest vocabularies with merges have 800,000
MAX_ARRAY_ITEMS = 1 << 21
MAX_TENSOR_NAME_BYTES = 63
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32

_PART_NAME = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_U32 = Struct("<I")
_U64 = Struct("<Q")
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
_NUMBERS |= {_BOOL: "<u1"}
_LONGEST_RUN, _SHORTEST_RUN = 8192, 256  # strings of a list that are examined together
_EXPECTED_STRING_BYTES = 24  # a short string with its length
_SMALLEST_KEY_BYTES = 8 + 1 + 4 + 1
_SMALLEST_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8


def open_gguf(path: Path) -> TensorFiles:
    """Open a GGUF file, or a whole split model from any of its parts (`...-00002-of-00003.gguf`).

    The metadata comes from the first part.
    Raises ModelLoadError naming file, offset and reason.
    """
    with ExitStack() as opened:
        parts = map(Path, part_names(str(path), os.path.exists))
        files = {part: opened.enter_context(closing(MappedFile(part))) for part in parts}
        headers = [_HeaderReader(file).read() for file in files.values()]
        _check_parts(path, list(files), headers)
        opened.pop_all()
    tensors = {name: info for header in headers for name, info in header.tensors.items()}
    return TensorFiles(files, tensors, headers[0].metadata, headers[0].number_types)


def header_bytes(path: Path) -> int:
    """Return the length in bytes of a file's header. Raises ModelLoadError naming file, offset and reason."""
    with closing(MappedFile(path)) as file:
        reader = _HeaderReader(file)
        reader.read()
        return reader.position


def part_names(name: str, exists: Callable[[str], bool]) -> list[str]:
    """Return all parts of the model that the file `name` belongs to, in order.

    If the file is not one of several parts, only its own name is returned.
    name: with or without directory.
    Raises ModelLoadError naming an impossible or a missing part.
    """
    match = _PART_NAME.fullmatch(name)
    if match is None:
        return [name]
    part, count = int(match["part"]), int(match["count"])
    if not 1 <= part <= count <= MAX_PARTS:
        raise ModelLoadError(f"{name}: part {part} of {count} is impossible; parts count from 1 to at most {MAX_PARTS}")
    names = [f"{match['stem']}-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)]
    if missing := [part_name for part_name in names if not exists(part_name)]:
        raise ModelLoadError(f"{name}: {len(missing)} of {count} parts are missing, first {missing[0]}")
    return names


def _check_parts(path: Path, paths: Sequence[Path], headers: Sequence[TensorFiles]) -> None:
    """Reject parts that do not belong together."""
    first = headers[0].metadata
    if len(headers) == 1:
        if (count := first.get("split.count", 1)) not in (0, 1):
            raise ModelLoadError(
                f"{path}: a part of a model split into {count!r:.20} files, but its name is not "
                "NAME-00001-of-00002.gguf: give the parts their original names"
            )
        return
    num_tensors = sum(len(header.tensors) for header in headers)
    seen: set[str] = set()
    for i, (part, header) in enumerate(zip(paths, headers, strict=True)):
        expected: dict[str, object] = {"split.no": i, "split.count": len(paths), "split.tensors.count": num_tensors}
        if "general.architecture" in header.metadata:
            expected["general.architecture"] = first.get("general.architecture")
        for key, value in expected.items():
            if header.metadata.get(key) != value:
                raise ModelLoadError(
                    f"{part}: {key} is {header.metadata.get(key)!r:.40} instead of {value!r:.40}: "
                    f"not a part of {path.name}?"
                )
        if both := seen.intersection(header.tensors):
            raise ModelLoadError(
                f"{part}: tensor {min(both)!r} is also in an earlier part: these are parts of two models"
            )
        seen.update(header.tensors)


class _HeaderReader:
    """Reads a file's header from its start. `position` is the offset of the next byte."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.data = file.data
        self.size = file.size
        self.end = min(file.size, MAX_HEADER_BYTES)
        self.position = 0
        self.num_strings = 0
        self.number_types: dict[str, str] = {}

    def read(self) -> TensorFiles:
        """Read the metadata and the tensor directory. Raises ModelLoadError naming file, offset and reason."""
        self._check_version()
        counts_at = self.position
        num_tensors, num_keys = self._u64("the number of tensors"), self._u64("the number of keys")
        self._check_count("tensors", num_tensors, MAX_TENSORS, _SMALLEST_TENSOR_BYTES, counts_at)
        self._check_count("keys", num_keys, MAX_KEYS, _SMALLEST_KEY_BYTES, counts_at + 8)
        metadata: dict[str, object] = {}
        alignment = DEFAULT_ALIGNMENT
        for _ in range(num_keys):
            start = self.position
            key = self._name("key", MAX_KEY_BYTES)
            if key in metadata:
                raise self._error(start, f"key {key!r:.80} appears twice")
            value_at = self.position
            metadata[key] = value = self._value(f"{key!r:.80}")
            if not isinstance(value, str | bool | list | np.ndarray):
                self.number_types[key] = _NUMBERS[int(_U32.unpack_from(self.data, value_at)[0])]
            if key != "general.alignment":
                continue
            if type(value) is not int or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
                raise self._error(start, f"{key} is {value!r:.80}; it must be a power of two from 8 to {MAX_ALIGNMENT}")
            alignment = value
        tensors = self._directory(num_tensors, alignment)
        return TensorFiles({self.file.path: self.file}, tensors, metadata, self.number_types)

    def _error(self, offset: int, reason: str) -> ModelLoadError:
        return ModelLoadError(f"{self.file.path}: offset {offset}: {reason}")

    def _beyond(self, offset: int, nbytes: int, what: str) -> ModelLoadError:
        left = self.size - offset
        if nbytes > left:
            return self._error(offset, f"{what} takes {nbytes} bytes, but the file ends after {left}: truncated?")
        return self._error(offset, f"{what} goes beyond the first {MAX_HEADER_BYTES} bytes, the limit for a header")

    def _take(self, nbytes: int, what: str) -> int:
        """Skip the next `nbytes` bytes and return their offset."""
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

    def _name(self, what: str, limit: int) -> str:
        start = self.position
        name = self._string(f"a {what}", limit)
        if not name or "\0" in name:
            raise self._error(start, f"{what} {name!r:.80} is empty or contains a NUL byte")
        return name

    def _check_version(self) -> None:
        start = self._take(4, "the magic number")
        magic = self.data[start : start + 4]
        if magic != b"GGUF":
            hint = _what_it_is(magic, self.data[:8])
            raise self._error(start, f"not a GGUF file: it starts with {magic!r} instead of b'GGUF'{hint}")
        start = self.position
        version = self._u32("the version")
        if version in (1 << 24, 2 << 24, 3 << 24):
            raise self._error(start, "a big-endian GGUF file; convert the model to a little-endian one")
        if version not in (2, 3):
            raise self._error(start, f"GGUF version {version}; versions 2 and 3 are supported: convert the model again")

    def _check_count(self, what: str, count: int, limit: int, smallest: int, offset: int) -> None:
        room = (self.size - self.position) // smallest
        if count > min(limit, room):
            reason = f"the limit is {limit}" if limit <= room else f"the file has room for {room}"
            raise self._error(offset, f"{count} {what}, but {reason}")

    def _value(self, key: str) -> object:
        """Read the type and the value that follow a key.

        key: the key's name for error messages.
        """
        start = self.position
        kind = self._u32(f"the type of {key}")
        if kind == _STRING:
            return self._string(f"the value of {key}", MAX_STRING_BYTES)
        if kind != _ARRAY:
            return self._numbers(key, kind, 1, start).item()
        start = self.position
        kind = self._u32(f"the item type of {key}")
        count = self._u64(f"the length of {key}")
        if kind == _STRING:
            return self._strings(key, count, start + 4)
        if kind == _ARRAY:
            raise self._error(start, f"key {key} is an array of arrays, which is not supported")
        return self._numbers(key, kind, count, start)

    def _numbers(self, key: str, kind: int, count: int, offset: int) -> NDArray[Any]:
        """Read the next numbers or bools.

        offset: position of their type in the file, for error messages. In an array, the length follows the type.
        """
        if kind not in _NUMBERS:
            raise self._error(offset, f"key {key} has the unknown type {kind}")
        dtype = np.dtype(_NUMBERS[kind])
        if count > 1:
            self._check_count(f"items in {key}", count, MAX_ARRAY_ITEMS, dtype.itemsize, offset + 4)
        at = self._take(count * dtype.itemsize, f"the value of {key}")
        # Copied: a view would keep the whole file mapped for as long as the metadata lives.
        items: NDArray[Any] = np.frombuffer(self.data, dtype, count, at).copy()
        if kind != _BOOL:
            return items
        if count and items.max() > 1:
            raise self._error(at + int(items.argmax()), f"key {key} holds a bool with the value {items.max()}")
        return items.astype(np.bool_)

    def _strings(self, key: str, count: int, offset: int) -> list[str]:
        """Read a list of strings.

        A vocabulary may have 300,000 strings, and so may its merges, so runs of short strings are read at once.
        """
        self._check_count(f"strings in {key}", count, MAX_LISTED_STRINGS - self.num_strings, 8, offset)
        self.num_strings += count
        strings: list[str] = []
        run = _LONGEST_RUN
        while len(strings) < count:
            short = self._short_strings(min(count - len(strings), run))
            strings += short
            is_long = 2 * len(short) >= run
            run = _LONGEST_RUN if is_long else _SHORTEST_RUN
            self._any_strings(key, strings, min(count - len(strings), 1 if is_long else run))
        return strings

    def _any_strings(self, key: str, strings: list[str], count: int) -> None:
        """Append the next `count` strings, reading them one by one."""
        data, last, unpack, limit = self.data, self.end, _U64.unpack_from, MAX_LISTED_STRING_BYTES
        end = self.position
        try:
            for _ in range(count):
                start = end + 8
                if start > last:
                    raise self._beyond(end, 8, f"the length of string {len(strings)} of {key}")
                (length,) = unpack(data, end)
                end = start + length
                if length > limit:
                    what = f"string {len(strings)} of {key} has a length of {length} bytes"
                    raise self._error(start - 8, f"{what}, the limit is {limit}")
                if end > last:
                    raise self._beyond(start, length, f"string {len(strings)} of {key}")
                strings.append(data[start:end].decode())
        except UnicodeDecodeError as error:
            raise self._error(start + error.start, f"string {len(strings)} of {key} is not UTF-8") from error
        self.position = end

    def _short_strings(self, count: int) -> list[str]:
        """Read at most `count` strings, up to the first that is empty, too long, damaged or has a NUL character.

        The length of a string of 1 to 255 bytes is stored as one byte followed by seven zeros, and no other byte is
        zero. numpy finds all such lengths at once. Then each string must end exactly where the next length begins.
        """
        start = self.position
        data = np.frombuffer(self.data[start : min(self.end, start + count * _EXPECTED_STRING_BYTES)], np.uint8)
        is_zero = data == 0
        pairs = is_zero[:-1] & is_zero[1:]
        fours = pairs[:-2] & pairs[2:]
        lengths_at = np.flatnonzero(~is_zero[:-7] & fours[1:-3] & fours[4:])[:count]
        next_at = lengths_at + 8 + data[lengths_at]
        is_last = np.flatnonzero(next_at[:-1] != lengths_at[1:])
        num_strings = int(is_last[0]) if len(is_last) else len(lengths_at) - 1
        if num_strings < 1 or lengths_at[0] != 0:
            return []
        end = int(lengths_at[num_strings])
        text = data[:end].copy()
        text[lengths_at[:num_strings]] = 0  # each length becomes the one NUL character before its string
        if np.count_nonzero(is_zero[:end]) != 7 * num_strings:
            return []
        try:
            strings: list[str] = text[~is_zero[:end]].tobytes().decode().split("\0")[1:]
        except UnicodeDecodeError:
            return []
        self.position = start + end
        return strings

    def _directory(self, num_tensors: int, alignment: int) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for _ in range(num_tensors):
            start = self.position
            info = self._tensor(alignment)
            if info.name in tensors:
                raise self._error(start, f"tensor {info.name!r} appears twice")
            tensors[info.name] = info
        data_start = -(-self.position // alignment) * alignment
        tensors = {name: replace(info, offset=data_start + info.offset) for name, info in tensors.items()}
        for begin, end in check_layout(self.file, tensors, data_start):
            if end - begin >= alignment:
                logger.warning("%s: bytes %d to %d belong to no tensor", self.file.path, begin, end)
        return tensors

    def _tensor(self, alignment: int) -> TensorInfo:
        """Read one entry of the directory. Its offset is still relative to the data."""
        name = self._name("tensor name", MAX_TENSOR_NAME_BYTES)
        tensor = f"tensor {name!r:.80}"
        at = self.position
        num_dimensions = self._u32(f"the number of dimensions of {name!r:.80}")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._error(at, f"{tensor} has {num_dimensions} dimensions; 1 to {MAX_DIMENSIONS} are possible")
        at = self.position
        shape = tuple(self._u64(f"a dimension of {name!r:.80}") for _ in range(num_dimensions))[::-1]
        if not all(0 < n < 1 << 63 for n in shape):
            raise self._error(at, f"{tensor} has the impossible shape {shape}")
        at = self.position
        type_id = self._u32(f"the type of {name!r:.80}")
        if type_id not in GGML_TYPES:
            raise self._error(at, f"{tensor} has type {type_id}, which is unknown or was removed from the format")
        type_name = GGML_TYPES[type_id]
        values_per_block, bytes_per_block = BLOCK_SIZES[type_name]
        if shape[-1] % values_per_block:
            reason = f"rows of {shape[-1]} values, which is not a multiple of {values_per_block}"
            raise self._error(at, f"{tensor} of type {type_name} has {reason}")
        at = self.position
        offset = self._u64(f"the offset of {name!r:.80}")
        if offset % alignment:
            raise self._error(at, f"{tensor} is at offset {offset}, which is not a multiple of {alignment}")
        nbytes = prod(shape) // values_per_block * bytes_per_block
        return TensorInfo(name, type_name, shape, self.file.path, offset, nbytes)


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
