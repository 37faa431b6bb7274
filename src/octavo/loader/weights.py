"""The weights of a model by their names in the graph, each made from stored tensors on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from octavo.loader.tensor_files import TensorFiles
from octavo.quantization.packed import Weight


@dataclass(frozen=True, slots=True)
class Source:
    """The description of a weight that is made on demand.

    type_name, shape: those of the weight. nbytes: size of the stored tensors. tensors: their names in the file.
    steps: description of the transforms, the same text for the same result.
    """

    type_name: str
    shape: tuple[int, ...]
    nbytes: int
    tensors: tuple[str, ...]
    make: Callable[[], Weight]
    steps: str = ""


class Weights(Mapping[str, Weight]):
    """The weights by name; every look-up makes the weight again from the mapped file."""

    def __init__(self, sources: Mapping[str, Source], file: TensorFiles) -> None:
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
        """Type, shape and size of a weight, without making it."""
        return self._sources[name]

    def release(self, name: str) -> None:
        """Lets the system reclaim the pages of this weight, once a backend has packed it."""
        for tensor in self._sources[name].tensors:
            self._file.release(tensor)

    def fingerprint(self, name: str) -> bytes:
        """The transforms of a weight and a sample of its stored bytes, which together identify it."""
        source = self._sources[name]
        return b"".join([source.steps.encode(), *map(self._file.sample, source.tensors)])
