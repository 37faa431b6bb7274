"""A GGUF model: one file or all parts of a split one, mapped and never copied."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from octavo.errors import ModelLoadError
from octavo.loader.gguf_header import GGUFHeader, read_header
from octavo.loader.mapped_file import MappedFile
from octavo.loader.tensor_files import TensorFiles
from octavo.quantization.packed import DENSE_TYPES, DenseWeight, GGMLWeight, Weight

MAX_PARTS = 1000
_PART_NAME = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_NO_WEIGHTS = frozenset({"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"})


class GGUFFile(TensorFiles):
    """Metadata, tensor directory and weights of a GGUF model.

    metadata: values are bool, int, float, str, list[str], or a numpy array for arrays of numbers.
    tensors: by the names in the file, in its order.
    """

    def __init__(self, files: Mapping[Path, MappedFile], headers: list[GGUFHeader]) -> None:
        super().__init__(files, {name: info for header in headers for name, info in header.tensors.items()})
        self.version = headers[0].version
        self.metadata: Mapping[str, object] = MappingProxyType(dict(headers[0].metadata))

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Opens the file, or from any part of a split model (`...-00002-of-00003.gguf`) the whole of it.

        Raises ModelLoadError naming file, offset and reason.
        """
        files: dict[Path, MappedFile] = {}
        headers: list[GGUFHeader] = []
        try:
            for part in part_paths(path):
                files[part] = MappedFile(part)
                headers.append(read_header(files[part]))
            _check_parts(path, list(files), headers)
        except BaseException:
            for file in files.values():
                file.close()
            raise
        return cls(files, headers)

    def weight(self, name: str) -> Weight:
        info = self._info(name)
        if info.type_name in _NO_WEIGHTS:
            raise ModelLoadError(
                f"{info.file}: offset {info.offset}: tensor {name!r} has type {info.type_name}, "
                "which is not a type for weights"
            )
        data = self.array(name)
        if info.type_name in DENSE_TYPES:
            return DenseWeight.from_bytes(info.type_name, data, info.shape)
        return GGMLWeight(info.type_name, data, info.shape)


def part_names(name: str) -> list[str]:
    """All parts of the model that the file `name` belongs to, in order; only itself if it is not named like a part."""
    match = _PART_NAME.fullmatch(name)
    if match is None:
        return [name]
    part, count = int(match["part"]), int(match["count"])
    if not 1 <= part <= count <= MAX_PARTS:
        raise ModelLoadError(f"{name}: part {part} of {count} is impossible; parts count from 1 to at most {MAX_PARTS}")
    return [f"{match['stem']}-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)]


def part_paths(path: Path) -> list[Path]:
    """The paths of `part_names`. Raises ModelLoadError naming a missing part."""
    paths = [path.with_name(name) for name in part_names(path.name)]
    if len(paths) > 1 and (missing := [p.name for p in paths if not p.exists()]):
        raise ModelLoadError(f"{path}: {len(missing)} of {len(paths)} parts are missing, first {missing[0]}")
    return paths


def _check_parts(path: Path, paths: list[Path], headers: list[GGUFHeader]) -> None:
    """Refuses parts that do not belong together."""
    if len(headers) == 1:
        count = headers[0].metadata.get("split.count", 1)
        if count not in (0, 1):
            raise ModelLoadError(
                f"{path}: a part of a model split into {count!r:.20} files, but its name is not "
                "NAME-00001-of-00002.gguf: give the parts their names back"
            )
        return
    first = headers[0].metadata
    for i, (part, header) in enumerate(zip(paths, headers, strict=True)):
        expected: dict[str, object] = {"split.no": i, "split.count": len(paths)}
        expected["split.tensors.count"] = sum(len(h.tensors) for h in headers)
        for key, value in expected.items():
            if header.metadata.get(key) != value:
                raise ModelLoadError(
                    f"{part}: {key} is {header.metadata.get(key)!r:.40} instead of {value}: not a part of {path.name}?"
                )
        if header.metadata.get("general.architecture", first.get("general.architecture")) != first.get(
            "general.architecture"
        ):
            raise ModelLoadError(f"{part}: another general.architecture than {paths[0].name}: parts of two models")
        for name in header.tensors:
            if any(name in other.tensors for other in headers[:i]):
                raise ModelLoadError(f"{part}: tensor {name!r} is also in an earlier part: parts of two models")
