"""The weights of a graph with some streamed layers, and where each weight is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from octavo.backends import CHECKING, PackCacheOptions
from octavo.backends.parameters import parameter_info
from octavo.backends.torch.layer_file import LayerFile
from octavo.backends.torch.layer_ring import (
    CopyEngine,
    FileCopies,
    HostCopies,
    LayerRing,
    StreamCopies,
    StreamedLayers,
)
from octavo.backends.torch.storages import Layout
from octavo.backends.torch.weights import DeviceWeights
from octavo.config import LoadProgress
from octavo.graph.builder import Graph
from octavo.graph.values import Parameter
from octavo.quantization.packed import Weight


def places_of(num_layers: int) -> int:
    """Choose how many ring buffers to use for `num_layers` streamed layers.

    Except for a single layer, there are fewer buffers than layers; otherwise every layer could stay resident.

    With three buffers, one layer is being computed, one is ready and one is being copied. If all buffers serve equally
    many layers, no step waits at its end for the buffer of its first layer.
    """
    if num_layers >= 6 and num_layers % 3 == 0:
        return 3
    return min(2, max(num_layers - 1, 1))


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """layers: indices of the streamed layers of a graph, ascending.
    pack_cache: where to keep the file from which each step reads the layers; None means that the layers are in main
    memory.
    num_bytes: approximate size of that file.
    """

    layers: tuple[int, ...]
    pack_cache: PackCacheOptions | None = None
    num_bytes: int = 0


def streamed_parameters(graph: Graph, layers: Sequence[int]) -> dict[int, list[Parameter]]:
    """Return the weights that each of these layers uses alone, by layer. All other weights stay on the device."""
    users: dict[Parameter, set[int | None]] = {}
    for node in graph.nodes:
        for parameter in node.op.parameters:
            users.setdefault(parameter, set()).add(node.layer_index)
    found: dict[int, list[Parameter]] = {layer: [] for layer in layers}
    for parameter in graph.parameters:
        [layer, *others] = users[parameter]
        if not others and layer in found:
            found[layer].append(parameter)
    return found


def load_streamed(
    graph: Graph,
    weights: Mapping[str, Weight],
    dtype: torch.dtype,
    device: torch.device,
    plan: StreamPlan,
    progress: LoadProgress | None = None,
    copies: CopyEngine | None = None,
) -> DeviceWeights:
    """Load all weights of a graph as tensors on the device. The weights of a streamed layer are copied in its turn.

    copies: copies layers to the ring; None means the device's default.
    """
    stored = {p: parameter_info(weights, p).nbytes for p in graph.parameters}
    before = 0

    def load(parameters: Sequence[Parameter], where: torch.device) -> DeviceWeights:
        nonlocal before
        report = None if progress is None else partial(_of_part, progress, before, sum(stored.values()))
        before += sum(stored[p] for p in parameters)
        return DeviceWeights(graph, weights, dtype, where, report, parameters, device)

    by_layer = {layer: found for layer, found in streamed_parameters(graph, plan.layers).items() if found}
    elsewhere = {parameter for found in by_layer.values() for parameter in found}
    kept = None
    if plan.pack_cache is not None:
        kept = LayerFile(plan.pack_cache, f"{dtype} {device.type}", weights, [*by_layer.values()])
        kept.check_limit(plan.num_bytes)  # before the slow part
    held = load([p for p in graph.parameters if p not in elsewhere], device)
    is_gpu = device.type == "cuda"

    def in_buffer(parameters: Sequence[Parameter]) -> tuple[DeviceWeights, Tensor]:
        layer = load(parameters, torch.device("cpu"))
        return layer, _bytes_of(layer, pinned=is_gpu and plan.pack_cache is None)

    found: Sequence[tuple[DeviceWeights, Any]]
    if kept is None:
        found = [*map(in_buffer, by_layer.values())]
    else:

        def checked(number: int) -> None:
            if progress is not None:
                progress(CHECKING, sum(stored.values()) * number // len(by_layer), sum(stored.values()))

        found = kept.layers(in_buffer, plan.num_bytes, checked)
    layers, sources = [layer for layer, _ in found], [source for _, source in found]
    largest = max((len(x) if isinstance(x, Tensor) else x.num_bytes for x in sources), default=0)
    places = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(places_of(len(sources)))]
    for number, layer in enumerate(layers):
        place = places[number % len(places)]
        layer.replace_tensors(partial(_seen_in, place))
        held.take(layer)
    held.nbytes += largest * len(places)
    copies = copies or (StreamCopies(device) if is_gpu else HostCopies())
    if plan.pack_cache is not None:
        copies = FileCopies(copies, largest, pinned=is_gpu)
    numbers: dict[int | None, int] = {layer: number for number, layer in enumerate(by_layer)}
    ring = LayerRing(sources, places, copies)
    held.streamed = StreamedLayers(ring, lambda node: numbers.get(node.layer_index), graph.nodes)
    return held


def _bytes_of(layer: DeviceWeights, *, pinned: bool) -> Tensor:
    """Return a layer's tensors in one buffer, and reduce the tensors themselves to their shapes and offsets in it."""
    layout = Layout(layer.tensors)
    # Zeros between tensors, so that the same layer always has the same bytes.
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8, pin_memory=pinned)
    layout.write(buffer)
    shapes = torch.empty(layout.nbytes, dtype=torch.uint8, device="meta")
    layer.replace_tensors(partial(layout.view, buffer=shapes))
    return buffer


def _seen_in(place: Tensor, shape: Tensor) -> Tensor:
    """Return a view of a buffer with the type, shape, strides and offset of the tensor `shape`."""
    return place.view(shape.dtype).as_strided(shape.shape, shape.stride(), shape.storage_offset())


def _of_part(progress: LoadProgress, before: int, total: int, phase: str, done: int, _: int) -> None:
    progress(phase, min(before + done, total), total)  # layers of a new file are laid out twice
