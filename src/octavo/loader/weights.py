"""The weights of a model by the names that its graph uses, each made from stored tensors when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from octavo.quantization.packed import Weight


@dataclass(frozen=True, slots=True)
class Source:
    """A weight before it is made.

    type_name, shape: those that it will have. nbytes: of the stored tensors. tensors: their names in the file.
    steps: how it is made of them, the same text for the same result.
    """

    type_name: str
    shape: tuple[int, ...]
    nbytes: int
    tensors: tuple[str, ...]
    make: Callable[[], Weight]
    steps: str = ""


class StoredTensors(Protocol):
    """An open model file."""

    def release(self, name: str) -> None: ...

    def sample(self, name: str) -> bytes: ...


class Weights(Mapping[str, Weight]):
    """The weights by name, each made anew from the mapped file by every look-up."""

    def __init__(self, sources: Mapping[str, Source], file: StoredTensors) -> None:
        self._sources = sources
        self._file = file
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
        """Type, shape and size of a weight, which is not made for it."""
        return self._sources[name]

    def release(self, name: str) -> None:
        """Lets the system take the pages of this weight back, once a backend has packed it."""
        for tensor in self._sources[name].tensors:
            self._file.release(tensor)

    def fingerprint(self, name: str) -> bytes:
        """How a weight is made, and some bytes of the stored tensors: others for another weight."""
        source = self._sources[name]
        return b"".join([source.steps.encode(), *map(self._file.sample, source.tensors)])
