"""The mapped files of a model: its stored tensors, and the weights that are made from them on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelLoadError
from octavo.loader.mapped_file import MappedFile
from octavo.quantization.ggml import BLOCK_SIZES
from octavo.quantization.packed import DENSE_TYPES, DenseWeight, GGMLWeight, Weight


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The type, shape and location of a stored tensor."""

    name: str
    type_name: str  # the format's name: `F32`, `Q4_K`, `F8_E4M3`
    shape: tuple[int, ...]  # in numpy's order: [out_features, in_features]
    file: Path
    offset: int  # bytes from the start of the file
    nbytes: int


# Number types that only tables and intermediate results use.
_NO_WEIGHTS = frozenset({"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"})


class TensorFiles:
    """The mapped files of a model, their tensors by the names in the files, and the metadata of a GGUF model.

    Metadata values are bool, int, float, str, list[str], or a numpy array for arrays of numbers. `number_types` has the
    numpy type of every int and float, such as `<u4`.
    """

    def __init__(
        self,
        files: Mapping[Path, MappedFile],
        tensors: Mapping[str, TensorInfo],
        metadata: Mapping[str, object] = MappingProxyType({}),
        number_types: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._files = files
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(dict(tensors))
        self.metadata: Mapping[str, object] = MappingProxyType(dict(metadata))
        self.number_types: Mapping[str, str] = MappingProxyType(dict(number_types))

    @property
    def paths(self) -> list[Path]:
        """The files with the tensors."""
        return list(self._files)

    def weight(self, name: str) -> Weight:
        """Return the tensor of that name: a view of the mapped bytes if they are aligned, otherwise a copy.

        Raises ModelLoadError if there is none, if its type is not for weights, or if the file has changed.
        """
        info = self._info(name)
        if info.type_name in DENSE_TYPES:
            data = self.array(name)
            if info.offset % 4:
                data = data.copy()  # only in files from careless writers: both formats require aligned data
            return DenseWeight.from_bytes(info.type_name, data, info.shape)
        if info.type_name in BLOCK_SIZES and info.type_name not in _NO_WEIGHTS:
            return GGMLWeight.from_bytes(info.type_name, self.array(name), info.shape)
        raise ModelLoadError(
            f"{info.file}: offset {info.offset}: tensor {name!r:.80} has type {info.type_name}, which is not a type "
            f"for weights; {', '.join(DENSE_TYPES)} and the block types of GGUF files are supported"
        )

    def source(self, name: str) -> Source:
        """Return the description of the tensor that `weight` returns."""
        info = self._info(name)
        return Source(info.type_name, info.shape, info.nbytes, (name,), lambda: self.weight(name), name)

    def array(self, name: str) -> NDArray[np.uint8]:
        """Return the bytes of a tensor without copying.

        Raises ModelLoadError if there is none, or if the file has changed.
        """
        info = self._info(name)
        return self._files[info.file].array(info.offset, info.nbytes)

    def sample(self, name: str) -> bytes:
        """Return at most a page from the middle of this tensor."""
        info = self._info(name)
        return self._files[info.file].sample(info.offset, info.nbytes)

    def release(self, name: str) -> None:
        """Let the system reclaim the pages of this tensor, for example once a backend has packed it."""
        info = self._info(name)
        self._files[info.file].release(info.offset, info.nbytes)

    def identity(self) -> str | None:
        """Return a text that changes whenever the content may have changed, or None if the files changed just now."""
        identities = [file.identity() for file in self._files.values()]
        return None if None in identities else ", ".join(map(str, identities))

    def digest(self) -> str:
        """Return a hex digest that identifies a model on any machine.

        It covers names, types, shapes, and a page of each tensor.
        """
        found = blake2b(digest_size=16)
        for name, info in sorted(self.tensors.items()):
            found.update(repr((name, info.type_name, info.shape)).encode())
            found.update(self.sample(name))
        return found.hexdigest()

    def close(self) -> None:
        """Close the files. Weights that are still in use keep their files mapped. May be called twice."""
        for file in self._files.values():
            file.close()

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise ModelLoadError(f"{next(iter(self._files))}: there is no tensor {name!r:.80}")
        return self.tensors[name]


def check_layout(file: MappedFile, tensors: Mapping[str, TensorInfo], start: int) -> list[tuple[int, int]]:
    """Return the gaps between the tensors of a file, as (first byte, end).

    start: offset of the first byte of data.
    Raises ModelLoadError naming a tensor that overlaps another or extends beyond the end of the file.
    """
    end, before, gaps = start, "", []
    for info in sorted(tensors.values(), key=lambda info: (info.offset, info.nbytes)):
        where = f"{file.path}: offset {info.offset}: tensor {info.name!r:.80}"
        if info.offset + info.nbytes > file.size:
            last = info.offset + info.nbytes
            raise ModelLoadError(
                f"{where} is at bytes {info.offset} to {last}, but the file has {file.size}: truncated?"
            )
        if info.offset < end:
            raise ModelLoadError(f"{where} overlaps tensor {before!r:.80}, which ends at {end}")
        if info.offset > end:
            gaps.append((end, info.offset))
        end, before = info.offset + info.nbytes, info.name
    return gaps


@dataclass(frozen=True, slots=True)
class Source:
    """The description of a weight that is made on demand.

    type_name, shape: type and shape of the weight.
    nbytes: size of the stored tensors.
    tensors: names of these tensors in the file.
    steps: description of the transforms; the same text means the same result.
    """

    type_name: str
    shape: tuple[int, ...]
    nbytes: int
    tensors: tuple[str, ...]
    make: Callable[[], Weight]
    steps: str = ""


class Weights(Mapping[str, Weight]):
    """The weights by name. Every look-up makes the weight again from the mapped file."""

    def __init__(
        self,
        sources: Mapping[str, Source],
        file: TensorFiles,
        elsewhere: Mapping[str, TensorFiles] = MappingProxyType({}),
    ) -> None:
        """Collect the weights described by `sources`.

        file: the file that contains the stored tensors.
        elsewhere: for weights from another model, that model's file by the weight's name.
        """
        self._sources = sources
        self._file = file
        self._elsewhere = elsewhere
        self.shapes = {name: source.shape for name, source in sources.items()}

    def __getitem__(self, name: str) -> Weight:
        return self._sources[name].make()

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def info(self, name: str) -> Source:
        """Return the type, shape and size of a weight without making it."""
        return self._sources[name]

    def replaced(self, sources: Mapping[str, Source]) -> Weights:
        """Return the same weights, but with `sources` in place of the weights of the same names."""
        return Weights({**self._sources, **sources}, self._file, self._elsewhere)

    def joined(self, other: Weights, names: Iterable[str]) -> Weights:
        """Return the same weights, taking the named ones from another model if it has them."""
        taken = {name: other.info(name) for name in names if name in other}
        files = {name: other._file_of(name) for name in taken}
        return Weights({**self._sources, **taken}, self._file, {**self._elsewhere, **files})

    def release(self, name: str) -> None:
        """Let the system reclaim the pages of this weight, once a backend has packed it."""
        for tensor in self._sources[name].tensors:
            self._file_of(name).release(tensor)

    def fingerprint(self, name: str) -> bytes:
        """Return the transforms of a weight and a sample of its stored bytes, which together identify it."""
        source = self._sources[name]
        return b"".join([source.steps.encode(), *map(self._file_of(name).sample, source.tensors)])

    def _file_of(self, name: str) -> TensorFiles:
        return self._elsewhere.get(name, self._file)
