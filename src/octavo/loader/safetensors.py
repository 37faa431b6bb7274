"""Opens safetensors models: one file or the shards of an index, mapped and never copied.

Source: the safetensors format (`README.md` of the safetensors project). A file consists of the header's length as 8
bytes, little-endian; the header, a JSON object of tensors; then the data, without gaps.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing
from math import prod
from pathlib import Path

from octavo.errors import ModelLoadError
from octavo.loader.json_file import parse_json_object, read_json_object
from octavo.loader.mapped_file import MappedFile
from octavo.loader.tensor_files import TensorFiles, TensorInfo, check_layout

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"

# The format allows headers of 100 MB; published shards stay below 1 MB, and JSON takes ten times its size in memory.
MAX_HEADER_BYTES = 8 << 20
MAX_INDEX_BYTES = 16 << 20
MAX_SHARDS = 1000
MAX_TENSORS = 1 << 15
MAX_HEADER_ITEMS = MAX_TENSORS * 16
MAX_DIMENSIONS = 8

TYPE_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64}
TYPE_BITS |= {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8}
TYPE_BITS |= {"F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64}
"""The types of the format, with the bits of a number."""


def open_safetensors(path: Path) -> TensorFiles:
    """Open a `.safetensors` file, or all shards of an index (`model.safetensors.index.json`).

    Raises ModelLoadError naming file, offset and reason.
    """
    is_index = path.name.endswith(".index.json")
    shard_of, declared = _read_index(path) if is_index else ({}, None)
    tensors: dict[str, TensorInfo] = {}
    with ExitStack() as opened:
        shards = sorted(set(shard_of.values())) if is_index else [path]
        files = {shard: opened.enter_context(closing(MappedFile(shard))) for shard in shards}
        for shard, file in files.items():
            for name, tensor in _read_header(file).items():
                if is_index and shard_of.get(name) != shard:
                    where = shard_of[name].name if name in shard_of else "no shard"
                    raise ModelLoadError(f"{shard}: tensor {name!r:.80} is here, but the index puts it in {where}")
                tensors[name] = tensor
        for name, shard in shard_of.items():
            if name not in tensors:
                raise ModelLoadError(f"{shard}: tensor {name!r:.80} is missing, but the index puts it here")
        opened.pop_all()
    stored = sum(tensor.nbytes for tensor in tensors.values())
    if declared not in (None, stored):
        logger.warning("%s: total_size is %.40r, but the shards hold %d bytes", path, declared, stored)
    return TensorFiles(files, tensors)


def _read_index(path: Path) -> tuple[dict[str, Path], object]:
    """Return the shard of every tensor, and the total bytes according to the index.

    Shards are next to the index or in the blob store of a hub cache.
    """
    index = read_json_object(path, MAX_INDEX_BYTES)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{path}: weight_map is missing, empty or not an object")
    shards: dict[str, Path] = {}
    for name in weight_map.values():
        if isinstance(name, str) and name in shards:
            continue
        if not isinstance(name, str) or Path(name).name != name or "\0" in name or not name.endswith(".safetensors"):
            raise ModelLoadError(f"{path}: shard {name!r:.80} is not the name of a .safetensors file next to the index")
        shards[name] = path.parent / name
        if len(shards) > MAX_SHARDS:
            raise ModelLoadError(f"{path}: more than {MAX_SHARDS} shards")
        _check_link(shards[name])
    if missing := sorted(shard.name for shard in shards.values() if not shard.exists()):
        found = f"{len(missing)} of {len(shards)} shards are missing: {', '.join(missing[:3])}"
        raise ModelLoadError(f"{path}: {found}{', ...' if missing[3:] else ''}; download the whole checkpoint")
    notes = index.get("metadata")
    total_size = notes.get("total_size") if isinstance(notes, dict) else None
    return {tensor: shards[name] for tensor, name in weight_map.items()}, total_size


def _read_header(file: MappedFile) -> dict[str, TensorInfo]:
    """Return the tensor directory of one file, checked. Raises ModelLoadError naming file, offset and reason."""
    if file.size < 8:
        raise ModelLoadError(f"{file.path}: offset 0: {file.size} bytes, too short for a safetensors file")
    length = int.from_bytes(file.data[:8], "little")
    if length > min(MAX_HEADER_BYTES, file.size - 8):
        raise ModelLoadError(
            f"{file.path}: offset 0: the header has {length} bytes, but the limit is {MAX_HEADER_BYTES} "
            f"and the file ends after {file.size - 8}: not a safetensors file, or truncated"
        )
    text = file.data[8 : 8 + length]
    if text[:1] != b"{":
        raise ModelLoadError(f"{file.path}: offset 8: the header starts with {text[:1]!r} instead of '{{'")
    header = parse_json_object(text, file.path, 8, MAX_HEADER_ITEMS)
    notes = header.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(value, str) for value in notes.values()):
        raise ModelLoadError(f"{file.path}: offset 8: __metadata__ must map strings to strings")
    if len(header) > MAX_TENSORS:
        raise ModelLoadError(f"{file.path}: offset 8: {len(header)} tensors, the limit is {MAX_TENSORS}")
    data_start = 8 + length
    tensors = {name: _tensor(file.path, name, entry, data_start) for name, entry in header.items()}
    if gaps := check_layout(file, tensors, data_start):
        begin, end = gaps[0]
        raise ModelLoadError(f"{file.path}: offset {begin}: the bytes from here to {end} belong to no tensor")
    if (end := data_start + sum(tensor.nbytes for tensor in tensors.values())) != file.size:
        raise ModelLoadError(f"{file.path}: offset {end}: the tensors end here, but the file ends at {file.size}")
    return tensors


def _tensor(path: Path, name: str, entry: object, data_start: int) -> TensorInfo:
    where = f"{path}: offset 8: tensor {name!r:.80}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ModelLoadError(f"{where} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in TYPE_BITS:
        raise ModelLoadError(f"{where} has the unknown type {dtype!r:.40}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(_is_size, shape)):
        raise ModelLoadError(f"{where} has the impossible shape {shape!r:.80}; at most {MAX_DIMENSIONS} dimensions")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise ModelLoadError(f"{where} has the impossible data_offsets {offsets!r:.80}")
    begin, end = offsets
    bits = prod(shape) * TYPE_BITS[dtype]
    if bits % 8 or end - begin != bits // 8:
        raise ModelLoadError(
            f"{where} of type {dtype} and shape {shape} takes {-(-bits // 8)} bytes, "
            f"but its data_offsets {offsets} span {end - begin}"
        )
    return TensorInfo(name, dtype, tuple(shape), path, data_start + begin, end - begin)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _check_link(shard: Path) -> None:
    """Check that a link leads only into the blob store of the hub cache that its directory belongs to."""
    try:
        directory, target = shard.parent.resolve(), shard.resolve()
    except (OSError, RuntimeError) as error:
        raise ModelLoadError(f"{shard}: {error}") from error
    in_store = target.parent.name == "blobs" and target.parent.parent in directory.parents
    if target.parent != directory and not in_store:
        raise ModelLoadError(f"{shard}: a link to {target}, outside the model directory")
