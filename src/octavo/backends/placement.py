"""The operations of a model that a device computes, and those left to the CPU because the device's memory is full."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from octavo.errors import GraphError
from octavo.graph.builder import Graph
from octavo.graph.ops.moe import MoE
from octavo.graph.segments import cut_at, layer_borders


@dataclass(frozen=True, slots=True)
class Placement:
    """The division of a model's layers between the device and the CPU.

    The last `device_layers` of `num_layers` layers and the output head are on the device. The rest is on the CPU.

    cpu_experts: number of device layers, counted from the first, whose experts the CPU computes.
    streamed_layers: number of device layers whose weights are copied to the device in each step.
    """

    num_layers: int
    device_layers: int
    cpu_experts: int = 0
    streamed_layers: int = 0

    @property
    def is_whole(self) -> bool:
        """True if the whole model is on the device."""
        return self.device_layers == self.num_layers and not self.cpu_experts and not self.streamed_layers

    def __str__(self) -> str:
        if self.streamed_layers:
            return f"{self.streamed_layers} of {self.num_layers} layers are copied to the GPU in each step"
        text = f"{self.device_layers} of {self.num_layers} layers on the GPU"
        if self.cpu_experts:
            return f"{text}, without the experts of {self.cpu_experts}"
        return text


class PlacedPart(NamedTuple):
    """Consecutive operations of a graph that run in one place."""

    on_device: bool
    graph: Graph


def parts_of(graph: Graph, placement: Placement) -> list[PlacedPart]:
    """Return the parts in the order of a step. Raises GraphError if a part would read another part's cache."""
    if not placement.device_layers:
        return [PlacedPart(False, graph)]
    first_device_layer = placement.num_layers - placement.device_layers
    borders = layer_borders(graph)
    sides = []
    for index, node in enumerate(graph.nodes):
        layer = max(bisect_right(borders, index) - 1, 0) - first_device_layer
        is_expert = isinstance(node.op, MoE) and layer < placement.cpu_experts
        sides.append(layer >= 0 and not is_expert)
    cuts = [i for i in range(1, len(sides)) if sides[i] != sides[i - 1]]
    cuts = [0, *cuts, len(sides)]
    return [PlacedPart(sides[begin], part) for begin, part in zip(cuts, cut_at(graph, cuts), strict=False)]


def possible_layers(graph: Graph) -> list[int]:
    """Return the possible numbers of layers on a device, including 0 and all of them."""
    count, found = len(layer_borders(graph)), []
    for device_layers in range(count + 1):
        try:
            parts_of(graph, Placement(count, device_layers))
        except GraphError:  # a layer reads the cache of one on the other side
            continue
        found.append(device_layers)
    return found


def best_placement(graph: Graph, fits: Callable[[Placement], bool]) -> Placement:
    """Return the placement that puts as much of the model on the device as fits.

    fits: returns True if the device has room for a placement. If it returns False for one, it does so for all larger
    ones.

    Experts are the first to be left to the CPU, because a token reads few of them. Whole layers follow.
    """
    count = len(layer_borders(graph))
    if fits(whole := Placement(count, count)):
        return whole
    mixtures = len({node.layer for node in graph.nodes if isinstance(node.op, MoE)})
    without_experts = [Placement(count, count, k) for k in range(count, 0, -1)] if mixtures else []
    try:
        if without_experts and fits(without_experts[0]):
            return without_experts[_last(without_experts, fits)]
    except GraphError:  # layers that share a cache stay together
        pass
    layers = [Placement(count, n) for n in possible_layers(graph) if n < count]
    return layers[_last(layers, fits)]


def least_streamed(graph: Graph, fits: Callable[[Placement], bool]) -> Placement:
    """Return the placement with all layers on the device that streams the fewest layers.

    fits: as for `best_placement`.

    Unless all layers are streamed, their number is a multiple of two or three, so that the buffers of a ring can share
    them equally.
    """
    count = len(layer_borders(graph))
    numbers = [k for k in range(count, 0, -1) if k == count or k % 2 == 0 or k % 3 == 0]
    streamed = [Placement(count, count, streamed_layers=k) for k in numbers]
    return streamed[_last(streamed, fits)]


def spread(count: int, num_layers: int) -> tuple[int, ...]:
    """Choose `count` of `num_layers` layers, evenly spaced.

    Copies then also overlap the computation of resident layers.
    """
    return tuple(sorted({(2 * i + 1) * num_layers // (2 * count) for i in range(count)})) if count else ()


def _last(placements: list[Placement], fits: Callable[[Placement], bool]) -> int:
    """Return the index of the last placement that fits, or 0 if none does.

    Each placement is larger than the previous one.
    """
    return max(bisect_right(range(len(placements)), 0, key=lambda i: not fits(placements[i])) - 1, 0)
