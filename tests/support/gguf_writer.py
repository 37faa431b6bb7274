"""Writes GGUF files for tests: good ones and, field by field, hostile ones.

A file is made of pieces of bytes, so that any of them can be replaced by something impossible:

    model = gguf([key("general.architecture", "llama")], [Tensor("token_embd.weight", "F32", (4, 8), data)])
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.quantization.ggml import BLOCK_SIZES, GGML_TYPES
from octavo.quantization.packed import DenseWeight, GGMLWeight

KINDS = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "u8": 10, "i8": 11, "f8": 12, "b1": 7}
BOOL, STRING, ARRAY = 7, 8, 9
TYPE_IDS = {name: type_id for type_id, name in GGML_TYPES.items()}
Value = bool | int | float | str | list[str] | NDArray[np.generic]


@dataclass(frozen=True)
class Tensor:
    """One tensor. Fields that are left out are derived.

    shape: in numpy's order, [out_features, in_features].
    """

    name: str | bytes
    type_name: str
    shape: tuple[int, ...]
    data: bytes | None = None  # zeros
    type_id: int | None = None
    offset: int | None = None  # within the data
    dimensions: tuple[int, ...] | None = None  # as in the file, innermost first
    num_dimensions: int | None = None

    def nbytes(self) -> int:
        values, size = BLOCK_SIZES[self.type_name]
        return prod(self.shape) // values * size

    def content(self) -> bytes:
        return bytes(self.nbytes()) if self.data is None else self.data

    def entry(self, offset: int) -> bytes:
        dimensions = self.shape[::-1] if self.dimensions is None else self.dimensions
        count = len(dimensions) if self.num_dimensions is None else self.num_dimensions
        type_id = TYPE_IDS[self.type_name] if self.type_id is None else self.type_id
        return b"".join(
            [
                string(self.name),
                struct.pack("<I", count),
                *(struct.pack("<Q", n % (1 << 64)) for n in dimensions),
                struct.pack("<I", type_id % (1 << 32)),
                struct.pack("<Q", (offset if self.offset is None else self.offset) % (1 << 64)),
            ]
        )


def string(text: str | bytes, length: int | None = None) -> bytes:
    """Write a text's length and content; `length` writes a false length."""
    content = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(content) if length is None else length) + content


def key(name: str | bytes, value: Value, kind: int | None = None) -> bytes:
    """Write a key with its value. An int becomes the first of u32, i32, u64 or i64 that holds it, a float an f32."""
    if isinstance(value, str):
        return raw_key(name, STRING, string(value))
    if isinstance(value, bool):
        return raw_key(name, BOOL, bytes([value]))
    if isinstance(value, list):
        items = b"".join(map(string, value))
        return raw_key(name, ARRAY, struct.pack("<IQ", STRING, len(value)) + items)
    if isinstance(value, np.ndarray):
        code = KINDS[value.dtype.str[1:]]
        return raw_key(name, ARRAY, struct.pack("<IQ", code, value.size) + value.tobytes())
    if isinstance(value, float):
        return raw_key(name, 6, struct.pack("<f", value))
    formats = {4: "<I", 5: "<i", 10: "<Q", 11: "<q", 0: "<B", 1: "<b", 2: "<H", 3: "<h"}
    if kind is None:
        kind = 4 if 0 <= value < 1 << 32 else 5 if -(1 << 31) <= value < 0 else 10 if value > 0 else 11
    return raw_key(name, kind, struct.pack(formats[kind], value))


def raw_key(name: str | bytes, kind: int, value: bytes) -> bytes:
    """Write a key with a value of any type and content."""
    return string(name) + struct.pack("<I", kind % (1 << 32)) + value


def gguf(
    keys: Iterable[bytes] = (),
    tensors: Sequence[Tensor] = (),
    *,
    version: int = 3,
    magic: bytes = b"GGUF",
    num_tensors: int | None = None,
    num_keys: int | None = None,
    alignment: int = 32,
) -> bytes:
    """Write a whole file. The counts can be replaced; `alignment` places the data but writes no key."""
    keys = list(keys)
    entries, data = [], b""
    for tensor in tensors:
        data += bytes(-len(data) % alignment)
        entries.append(tensor.entry(len(data)))
        data += tensor.content()
    num_tensors = len(tensors) if num_tensors is None else num_tensors
    num_keys = len(keys) if num_keys is None else num_keys
    counts = struct.pack("<QQ", num_tensors % (1 << 64), num_keys % (1 << 64))
    header = magic + struct.pack("<I", version) + counts + b"".join(keys) + b"".join(entries)
    return header + bytes(-len(header) % alignment) + data if tensors else header


def from_weight(name: str, weight: DenseWeight | GGMLWeight) -> Tensor:
    """Return a tensor with the content of `weight`."""
    return Tensor(name, weight.type_name, weight.shape, np.ascontiguousarray(weight.data).tobytes())


def write_split(
    directory: Path, stem: str, keys: Sequence[bytes], parts: Sequence[Sequence[Tensor]], *, declared: int | None = None
) -> list[Path]:
    """Write a model in parts, such as `STEM-00001-of-00003.gguf`, with the metadata in the first."""
    total = sum(map(len, parts)) if declared is None else declared
    paths = []
    for i, tensors in enumerate(parts):
        split = [key("split.no", i, 2), key("split.count", len(parts), 2), key("split.tensors.count", total)]
        path = directory / f"{stem}-{i + 1:05}-of-{len(parts):05}.gguf"
        path.write_bytes(gguf([*(keys if i == 0 else []), *split], tensors))
        paths.append(path)
    return paths
