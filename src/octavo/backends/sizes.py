"""The memory that a model takes on a backend, known before it is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from octavo.graph.builder import Graph
from octavo.graph.cache import CacheSizes
from octavo.graph.layer_formats import LayerFormat
from octavo.graph.values import Parameter


@dataclass(frozen=True, slots=True)
class PackedType:
    """The matrices of one stored type, packed as `packed_as`. The bytes are those of all of them."""

    type_name: str
    packed_as: str
    stored_bytes: int
    packed_bytes: int

    @property
    def factor(self) -> float:
        """The ratio of the packed size to the stored size."""
        return self.packed_bytes / max(self.stored_bytes, 1)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes in bytes. graph: as the backend runs it. weights: packed size of each of its parameters.

    types: the types of its matrices, the largest total first. kv_formats: number format of each layer's cache; empty if
    the backend stores all caches alike.
    """

    graph: Graph
    weights: Mapping[Parameter, int]
    types: tuple[PackedType, ...]
    workspace_bytes: int
    cache: CacheSizes
    kv_formats: Mapping[int, LayerFormat]

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    @property
    def kv_element_bytes(self) -> float:
        """Bytes of an element in the cache, with its share of padding and scales, for `StepSizes`."""
        return self.cache.token_bytes / max(self.graph.kv_elements_per_token, 1)

    @property
    def grown(self) -> tuple[PackedType, ...]:
        """The types without a kernel of their own, which take more memory than in the file."""
        return tuple(t for t in self.types if t.packed_as != t.type_name and t.packed_bytes > t.stored_bytes)


def sum_types(matrices: Iterable[PackedType]) -> tuple[PackedType, ...]:
    """The sums for each stored type, from the sizes of each matrix."""
    sums: dict[tuple[str, str], PackedType] = {}
    for matrix in matrices:
        key = (matrix.type_name, matrix.packed_as)
        other = sums.get(key, PackedType(*key, 0, 0))
        stored, packed = other.stored_bytes + matrix.stored_bytes, other.packed_bytes + matrix.packed_bytes
        sums[key] = PackedType(*key, stored, packed)
    return tuple(sorted(sums.values(), key=lambda t: -t.packed_bytes))
