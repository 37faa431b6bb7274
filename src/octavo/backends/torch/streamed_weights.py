"""The weights of a graph of which some layers are streamed: where each lies, and the file of those on disk."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from octavo import env
from octavo.backends.parameters import parameter_info
from octavo.backends.torch.storages import Layout
from octavo.backends.torch.stream import (
    CopyEngine,
    FileCopies,
    FileLayer,
    HostCopies,
    LayerRing,
    StreamCopies,
    StreamedLayers,
)
from octavo.backends.torch.weights import DeviceWeights
from octavo.config import LoadProgress
from octavo.errors import InsufficientMemoryError
from octavo.graph.builder import Graph
from octavo.graph.values import Parameter
from octavo.quantization.packed import Weight


def places_of(num_layers: int) -> int:
    """The places of a ring for so many streamed layers: fewer than layers, which could all stay otherwise.

    With three, one layer is computed, one is there and one on its way. If the layers of all places are equally many,
    no step waits at its end for the place of its first layer.
    """
    if num_layers >= 6 and num_layers % 3 == 0:
        return 3
    return min(2, max(num_layers - 1, 1))


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """layers: indices of the streamed layers of a graph, ascending. on_disk: they are read from a file in each step."""

    layers: tuple[int, ...]
    on_disk: bool = False


def streamed_parameters(graph: Graph, layers: Sequence[int]) -> dict[int, list[Parameter]]:
    """The weights that only one of these layers uses, by layer. All others stay on the device."""
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
    """All weights of a graph as tensors on the device; those of streamed layers have their numbers there in their turn.

    copies: None: those of the device.
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
    held = load([p for p in graph.parameters if p not in elsewhere], device)
    is_gpu = device.type == "cuda"
    file = _LayerFile() if plan.on_disk else None
    sources: list[Any] = []
    layers: list[DeviceWeights] = []
    for found in by_layer.values():
        layer = load(found, torch.device("cpu"))
        layout = Layout(layer.tensors)
        buffer = torch.empty(layout.nbytes, dtype=torch.uint8, pin_memory=is_gpu and file is None)
        layout.write(buffer)
        sources.append(buffer if file is None else file.append(buffer))
        # Only the shapes of the tensors and their places in the buffer are kept.
        shapes = torch.empty(layout.nbytes, dtype=torch.uint8, device="meta")
        layer.replace_tensors(partial(layout.view, buffer=shapes))
        layers.append(layer)
    largest = max((len(x) if isinstance(x, Tensor) else x.num_bytes for x in sources), default=0)
    places = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(places_of(len(sources)))]
    for number, layer in enumerate(layers):
        place = places[number % len(places)]
        layer.replace_tensors(partial(_seen_in, place))
        held.take(layer)
    held.nbytes += largest * len(places)
    if copies is None:
        copies = StreamCopies(device) if is_gpu else HostCopies()
    if file is not None:
        copies = FileCopies(copies, largest, pinned=is_gpu)
    numbers: dict[int | None, int] = {layer: number for number, layer in enumerate(by_layer)}
    ring = LayerRing(sources, places, copies)
    held.streamed = StreamedLayers(ring, lambda node: numbers.get(node.layer_index), graph.nodes)
    return held


def _seen_in(place: Tensor, shape: Tensor) -> Tensor:
    """The tensor of this shape and these strides, at its offset in a place."""
    return place.view(shape.dtype).as_strided(shape.shape, shape.stride(), shape.storage_offset())


def _of_part(progress: LoadProgress, before: int, total: int, phase: str, done: int, _: int) -> None:
    progress(phase, before + done, total)


class _LayerFile:
    """The streamed layers one after another in a file without a name, which is gone with the process that reads it."""

    def __init__(self) -> None:
        folder = env.pack_cache_dir()
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - the layers read it until the process ends
        self._end = 0

    def append(self, buffer: Tensor) -> FileLayer:
        """Raises InsufficientMemoryError if the disk is full."""
        data = buffer.numpy().data
        try:
            self._file.seek(self._end)
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            raise InsufficientMemoryError(
                f"{env.pack_cache_dir()}: the weights of streamed layers cannot be written ({error}); free space "
                "there, or take gpu_offload cpu"
            ) from None
        layer = FileLayer(self._file, self._end, len(data), zlib.crc32(data))
        self._end += len(data)
        return layer
