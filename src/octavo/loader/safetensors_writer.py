"""Writes safetensors models, tensor by tensor: one file, or the shards of an index.

Source: the safetensors format (`README.md` of the safetensors project), and the names and the index of transformers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from octavo.errors import ModelWriteError
from octavo.loader.atomic_file import AtomicFile, Chunk, check_free_space
from octavo.loader.safetensors import INDEX_NAME, MAX_HEADER_BYTES, MAX_SHARDS, TYPE_BITS

_ALIGNMENT = 8  # of the data, as the format requires


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """A tensor to write.

    type_name: the format's name for its type, such as `BF16`.
    chunks: called once; returns the bytes of the tensor piece by piece. Their total size must match type and shape.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[Chunk]]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * TYPE_BITS[self.type_name] // 8


def write_safetensors(path: Path, tensors: Sequence[SafeTensor]) -> None:
    """Write one file. It appears under its name once it is complete. Raises ModelWriteError naming file or tensor."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        if tensor.name in entries:
            raise ModelWriteError(f"tensor {tensor.name!r:.80} appears twice")
        end = position + tensor.nbytes
        offsets = [position, end]
        entries[tensor.name] = {"dtype": tensor.type_name, "shape": list(tensor.shape), "data_offsets": offsets}
        position = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    if len(header) > MAX_HEADER_BYTES:
        raise ModelWriteError(
            f"{path}: {len(tensors)} tensors take a header of {len(header):,} bytes; the limit is {MAX_HEADER_BYTES:,}"
        )
    with AtomicFile(path, struct.pack("<Q", len(header))) as file:
        file.write(header)
        for tensor in tensors:
            begin = file.position
            for chunk in tensor.chunks():
                file.write(chunk)
            if file.position - begin != tensor.nbytes:
                raise ModelWriteError(
                    f"tensor {tensor.name!r:.80} has {file.position - begin} bytes; {tensor.nbytes} are needed"
                )
        file.complete()
        file.publish()


def write_model(folder: Path, tensors: Sequence[SafeTensor], max_shard_bytes: int | None = None) -> list[Path]:
    """Write `model.safetensors` into a folder, or the shards `model-00001-of-00003.safetensors` with their index.

    max_shard_bytes: maximum size of the tensor data in a shard; None for one file. A larger tensor gets its own shard.

    Returns the files that contain tensors. Raises ModelWriteError naming file or tensor.
    """
    shards = _shards(tensors, max_shard_bytes)
    if len(shards) > MAX_SHARDS:
        raise ModelWriteError(f"{folder}: {len(shards)} shards; the limit is {MAX_SHARDS}: allow larger shards")
    total = sum(tensor.nbytes for tensor in tensors)
    check_free_space(folder, total)
    if len(shards) == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return [folder / "model.safetensors"]
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(folder / name, shard)
    places = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    text = json.dumps(index, indent=2).encode() + b"\n"
    with AtomicFile(folder / INDEX_NAME, text[:1]) as file:
        file.write(text[1:])
        file.complete()
        file.publish()
    return [folder / name for name in names]


def _shards(tensors: Sequence[SafeTensor], limit: int | None) -> list[list[SafeTensor]]:
    """Group consecutive tensors into shards of at most `limit` bytes, with at least one tensor each."""
    shards: list[list[SafeTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and limit is not None and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards
