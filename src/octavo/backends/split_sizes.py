"""The sizes of a model that is split between a device and the CPU, and of its cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from octavo.backends.memory import PackedType, Sizes, StreamedSizes
from octavo.graph.cache import CacheSizes

if TYPE_CHECKING:
    from octavo.backends.placement import Placement
    from octavo.graph.builder import Graph
    from octavo.graph.values import Parameter


@dataclass(frozen=True, slots=True)
class PartSizes:
    """A part of the model, and its sizes on the device or the CPU."""

    on_device: bool
    graph: Graph  # not yet optimized
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class SplitSizes(Sizes):
    """The sizes of all parts together."""

    parts: tuple[PartSizes, ...]
    placement: Placement
    reason: str = ""  # for the choice between layers on the CPU and streamed ones

    @property
    def num_cpu_parts(self) -> int:
        """The number of parts on the CPU: more than one if the CPU computes the experts of device layers."""
        return sum(not part.on_device for part in self.parts)

    def on(self, *, device: bool) -> Sizes:
        """Return the sizes of the parts on the device, or of the parts on the CPU with streamed layers' weights."""
        if not device and isinstance(streamed := self.parts[0].sizes, StreamedSizes):
            weights = {p: streamed.weights[p] for p in streamed.hosted}
            matrices = {p: streamed.matrices[p] for p in streamed.hosted if p in streamed.matrices}
            return replace(_together(self.graph, []), weights=weights, matrices=matrices)
        here = [part.sizes for part in self.parts if part.on_device == device]
        return here[0] if len(here) == 1 else _together(self.graph, here)


def _together(graph: Graph, parts: Sequence[Sizes]) -> Sizes:
    """Add up the sizes of the parts.

    graph: the whole model, whose cache layout all parts share.
    """
    weights: dict[Parameter, int] = {}
    matrices: dict[Parameter, PackedType] = {}
    for part in parts:
        for parameter, num_bytes in part.weights.items():
            weights[parameter] = weights.get(parameter, 0) + num_bytes
        matrices.update(part.matrices)
    cache = CacheSizes(
        graph.cache_layout,
        sum(part.cache.token_bytes for part in parts),
        sum(part.cache.block_token_bytes for part in parts),
        sum(part.cache.state_bytes for part in parts),
        tuple(name for part in parts for name in part.cache.formats),
    )
    formats = {layer: found for part in parts for layer, found in part.kv_formats.items()}
    providers = tuple(dict.fromkeys(line for part in parts for line in part.providers))
    workspace = sum(part.workspace_bytes for part in parts)
    return Sizes(graph, weights, matrices, workspace, cache, formats, providers=providers)


def sizes_of_parts(graph: Graph, parts: Sequence[PartSizes], placement: Placement) -> SplitSizes:
    """Return the combined sizes of all parts.

    graph: the whole model.
    """
    whole = _together(graph, [part.sizes for part in parts])
    return SplitSizes(
        whole.graph,
        whole.weights,
        whole.matrices,
        whole.workspace_bytes,
        whole.cache,
        whole.kv_formats,
        tuple(parts),
        placement,
        providers=whole.providers,
    )


def cache_room(sizes: SplitSizes, device_bytes: int, cpu_bytes: int) -> int:
    """Return the maximum size of the whole cache with which each part of the cache fits where it is stored.

    device_bytes, cpu_bytes: memory for the parts of the cache on the device and on the CPU.
    """
    room = device_bytes + cpu_bytes
    for is_device, here in ((True, device_bytes), (False, cpu_bytes)):
        part, whole = sizes.on(device=is_device).cache, sizes.cache
        for own, total in ((part.block_token_bytes, whole.block_token_bytes), (part.state_bytes, whole.state_bytes)):
            if own:
                room = min(room, here * total // own)
    return max(room, 0)
