"""Writes GGUF models, version 3: one file or several parts, tensor by tensor, completely or not at all.

Source: the GGUF specification (`docs/gguf.md` of ggml); the keys `split.*` and the names of parts are llama.cpp's.
Types of values: bool and str as they are; int as the first of uint32, int32, uint64 and int64 that can hold it; float
as float32; numpy numbers and arrays in their own type; sequences of str as an array of strings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from struct import Struct, pack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelWriteError
from octavo.loader.atomic_file import AtomicFile, Chunk, check_free_space
from octavo.loader.gguf import DEFAULT_ALIGNMENT, MAX_PARTS, MAX_TENSOR_NAME_BYTES
from octavo.quantization.ggml import GGML_TYPES, stored_bytes

MetadataValue = bool | int | float | str | np.generic | NDArray[Any] | Sequence[str]

_MAGIC = b"GGUF"
_TYPE_IDS = {name: type_id for type_id, name in GGML_TYPES.items()}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_LENGTH = Struct("<Q")
_NUMBERS = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "u8": 10, "i8": 11, "f8": 12, "b1": _BOOL}
_INTEGERS = (np.uint32, np.int32, np.uint64, np.int64)


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor to write.

    shape: in numpy's order, innermost last.
    chunks: called once; returns the bytes of the tensor piece by piece, in the layout of ggml type `type_name`. Their
    total size must match type and shape.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[Chunk]]

    @property
    def nbytes(self) -> int:
        """The size of its data. Raises ModelWriteError if a row is not a whole number of blocks."""
        try:
            return stored_bytes(self.type_name, self.shape)
        except (KeyError, ValueError) as error:
            raise ModelWriteError(f"tensor {self.name!r:.80} cannot be {self.type_name}: {error}") from error


def write_gguf(
    path: Path,
    metadata: Mapping[str, MetadataValue],
    tensors: Sequence[OutputTensor],
    *,
    max_part_bytes: int | None = None,
) -> list[Path]:
    """Write the model and return its files in order.

    path: the file, or for several parts the base of their names: `NAME.gguf` becomes `NAME-00001-of-00003.gguf`.
    metadata: keys `split.*` in it are replaced. Data is aligned to `general.alignment`, by default 32 bytes.
    max_part_bytes: maximum size of the tensor data in a part; None for one file. A larger tensor gets its own part.

    Parts get their names only once all are complete, the first part last.

    Raises ModelWriteError naming the file or the tensor. In that case no file has changed, except that a failure
    between two renames leaves later parts without the first.
    """
    metadata = {key: value for key, value in metadata.items() if not key.startswith("split.")}
    alignment = _alignment(metadata)
    _check_names(tensors)
    parts = _parts(tensors, max_part_bytes)
    check_free_space(path.parent, sum(tensor.nbytes + alignment for tensor in tensors))
    paths = [path]
    if len(parts) > 1:
        stem = path.name.removesuffix(".gguf")
        paths = [path.with_name(f"{stem}-{i:05}-of-{len(parts):05}.gguf") for i in range(1, len(parts) + 1)]
    with ExitStack() as opened:
        files = [opened.enter_context(AtomicFile(part, _MAGIC)) for part in paths]
        for i, (file, part) in enumerate(zip(files, parts, strict=True)):
            keys: dict[str, MetadataValue] = dict(metadata) if i == 0 else {}
            if len(parts) > 1:
                keys |= {
                    "split.no": np.uint16(i),
                    "split.count": np.uint16(len(parts)),
                    "split.tensors.count": np.int32(len(tensors)),
                }
            if i > 0 and "general.alignment" in metadata:
                keys["general.alignment"] = metadata["general.alignment"]
            _write_part(file, keys, part, alignment)
        for file in reversed(files):
            file.publish()
    return paths


def _alignment(metadata: Mapping[str, MetadataValue]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(value, int | np.integer) or value < 8 or value & (value - 1):
        raise ModelWriteError(f"general.alignment is {value!r:.40}; it must be a power of two of at least 8")
    return int(value)


def _check_names(tensors: Sequence[OutputTensor]) -> None:
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise ModelWriteError(f"tensor {tensor.name!r:.80} appears twice")
        seen.add(tensor.name)
        if not 0 < len(tensor.name.encode()) <= MAX_TENSOR_NAME_BYTES:
            raise ModelWriteError(
                f"tensor {tensor.name!r:.80} has a name of {len(tensor.name.encode())} bytes; "
                f"GGUF files allow 1 to {MAX_TENSOR_NAME_BYTES}"
            )


def _parts(tensors: Sequence[OutputTensor], max_part_bytes: int | None) -> list[list[OutputTensor]]:
    parts: list[list[OutputTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if max_part_bytes is not None and parts[-1] and size + tensor.nbytes > max_part_bytes:
            parts.append([])
            size = 0
        parts[-1].append(tensor)
        size += tensor.nbytes
    if len(parts) > MAX_PARTS:
        raise ModelWriteError(f"parts of {max_part_bytes} bytes make {len(parts)} files; the limit is {MAX_PARTS}")
    return parts


def _write_part(
    file: AtomicFile, metadata: Mapping[str, MetadataValue], tensors: Sequence[OutputTensor], alignment: int
) -> None:
    file.write(_header(metadata, tensors, alignment))
    file.pad(alignment)
    for tensor in tensors:
        start = file.position
        for chunk in tensor.chunks():
            file.write(chunk)
        if (written := file.position - start) != tensor.nbytes:
            raise ModelWriteError(f"tensor {tensor.name!r:.80} has {written} bytes; its type needs {tensor.nbytes}")
        file.pad(alignment)
    file.complete()


def _header(metadata: Mapping[str, MetadataValue], tensors: Sequence[OutputTensor], alignment: int) -> bytes:
    """Return everything between the magic number and the data."""
    pieces = [pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        pieces += [_string(key), _checked_value(key, value)]
    offset = 0
    for tensor in tensors:
        pieces.append(_string(tensor.name) + pack("<I", len(tensor.shape)))
        pieces.append(pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape)))
        pieces.append(pack("<IQ", _TYPE_IDS[tensor.type_name], offset))
        offset += _aligned(tensor.nbytes, alignment)
    return b"".join(pieces)


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _string(text: str) -> bytes:
    data = text.encode()
    return _LENGTH.pack(len(data)) + data


def _checked_value(key: str, value: object) -> bytes:
    try:
        return _value(value)
    except (TypeError, ValueError) as error:
        raise ModelWriteError(f"key {key!r:.80} cannot be written: {error}") from error


def _value(value: object) -> bytes:
    """Return the type and the bytes of a value. Raises TypeError for one that the format cannot represent."""
    if isinstance(value, str):
        return pack("<I", _STRING) + _string(value)
    if isinstance(value, np.ndarray):
        if value.ndim != 1:
            raise TypeError(f"an array of {value.ndim} dimensions")
        return pack("<IIQ", _ARRAY, _number_type(value.dtype), len(value)) + _little_endian(value)
    if isinstance(value, list | tuple):
        if not all(issubclass(kind, str) for kind in set(map(type, value))):
            raise TypeError("a list of items other than strings; use a numpy array for numbers")
        texts = [text.encode() for text in value]  # a vocabulary may have 300,000
        lengths = map(_LENGTH.pack, map(len, texts))
        return pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(
            chain.from_iterable(zip(lengths, texts, strict=True))
        )
    number = _as_number(value)
    return pack("<I", _number_type(number.dtype)) + _little_endian(number)


def _as_number(value: object) -> NDArray[Any]:
    if isinstance(value, np.generic):
        return np.array(value)
    if isinstance(value, bool):
        return np.array(value)
    if isinstance(value, float):
        return np.array(value, np.float32)
    if not isinstance(value, int):
        raise TypeError(f"a value of type {type(value).__name__}")
    for kind in _INTEGERS:
        if np.iinfo(kind).min <= value <= np.iinfo(kind).max:
            return np.array(value, kind)
    raise ValueError(f"{value} has more than 64 bits")


def _number_type(dtype: np.dtype[Any]) -> int:
    kind = f"{dtype.kind}{dtype.itemsize}"
    if kind not in _NUMBERS:
        raise TypeError(f"numbers of type {dtype}")
    return _NUMBERS[kind]


def _little_endian(array: NDArray[Any]) -> bytes:
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes()


def typed_metadata(metadata: Mapping[str, object], number_types: Mapping[str, str]) -> dict[str, MetadataValue]:
    """Return the metadata of an opened GGUF file, with each number in the type it has in the file.

    number_types: numpy names of the types of single numbers (`TensorFiles.number_types`).
    """
    typed: dict[str, MetadataValue] = {}
    for key, value in metadata.items():
        if key in number_types:
            typed[key] = np.dtype(number_types[key]).type(value)
        elif isinstance(value, bool | int | float | str | np.generic | np.ndarray | list):
            typed[key] = value
        else:
            raise ModelWriteError(f"key {key!r:.80} has a value of type {type(value).__name__}")
    return typed
