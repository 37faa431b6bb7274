"""The weights of a graph on the device: codes as planes, plain numbers in the type of the computation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.backends import PACKING
from octavo.backends.memory import PackedType
from octavo.backends.parameters import parameter_info, release, weight_of
from octavo.backends.torch.coded import has_products_of
from octavo.backends.torch.kernels.planes import Planes, joined_rows, planes_of, rows_apart
from octavo.backends.torch.layer_ring import StreamedLayers
from octavo.backends.torch.quantized import whole
from octavo.backends.torch.storages import Layout
from octavo.config import LoadProgress
from octavo.graph.builder import Graph, Node
from octavo.graph.ops.encoder import TokenTypeEmbedding
from octavo.graph.ops.latent_attention import HeadLinear
from octavo.graph.ops.linear import Embedding, FusedLinear, Linear, PositionEmbedding
from octavo.graph.ops.moe import MoE
from octavo.graph.values import Parameter
from octavo.quantization.ggml import BLOCK_SIZES, stored_bytes
from octavo.quantization.packed import (
    DENSE_TYPES,
    CodebookWeight,
    DenseWeight,
    Float8Weight,
    GGMLWeight,
    GroupedWeight,
    Weight,
)

_TYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def held_type(
    weights: Mapping[str, Weight], parameter: Parameter, dtype: torch.dtype, *, has_kernel: bool = True
) -> PackedType:
    """Return a matrix's stored type and the type in which it is held: as planes of codes, or as plain numbers.

    has_kernel: True if a kernel reads the planes; otherwise products unpack them.
    """
    info, shape = parameter_info(weights, parameter), parameter.shape
    planes = row_of_planes(info.type_name, shape)
    if planes is None:
        return PackedType(info.type_name, _TYPE_NAMES[dtype], info.nbytes, prod(shape) * dtype.itemsize)
    of_all = sum(x.nbytes for x in (planes.table, planes.column_order) if x is not None)
    held = (planes.nbytes - of_all) * prod(shape[:-1]) + of_all
    written = 0 if has_kernel else prod(shape) * dtype.itemsize
    return PackedType(info.type_name, info.type_name, info.nbytes, held, written)


def row_of_planes(type_name: str, shape: tuple[int, ...]) -> Planes | None:
    """Return a zero row [1, in] of a stored type as planes, or None if matrices of this shape are held as plain
    numbers.

    Stacks with a column order are always plain, because only the weight itself shows whether its experts share one
    order.
    """
    if type_name in DENSE_TYPES or (type_name.endswith("_ORDER") and len(shape) > 2):
        return None
    return _zeros(type_name, shape[-1])


@cache
def _zeros(type_name: str, width: int) -> Planes | None:
    if type_name in BLOCK_SIZES:
        row = np.zeros((1, stored_bytes(type_name, (width,))), np.uint8)
        return planes_of(GGMLWeight(type_name, row))
    if float8 := re.fullmatch(r"F8_(E4M3|E5M2)(?:_ROW|_(?:ALL|\d+)X(ALL|\d+))?", type_name):
        columns = int(float8[2]) if (float8[2] or "").isdigit() else None
        scales = np.zeros((1, -(-width // (columns or width))), np.float32)
        return planes_of(Float8Weight("E4M3", np.zeros((1, width), np.uint8), scales, 1, columns))
    if codebook := re.fullmatch(r"(NF4|FP4|NVFP4)_(\d+)", type_name):
        codes, count = np.zeros((1, width // 2), np.uint8), width // int(codebook[2])
        of_rows = np.zeros((1, 1), np.float32) if codebook[1] == "NVFP4" else None
        scales4 = np.zeros((1, count), np.float32 if of_rows is None else np.uint8)
        return planes_of(CodebookWeight(codebook[1], (0.0,) * 16, int(codebook[2]), codes, scales4, of_rows))
    found = re.fullmatch(r"I(\d)_(ROW|\d+)(_Z)?(_M)?(_F32)?(_ORDER)?", type_name)
    if found is None:
        return None
    bits, group = int(found[1]), width if found[2] == "ROW" else int(found[2])
    scales = np.zeros((1, width // group), np.float32 if found[5] else np.float16)
    return planes_of(
        GroupedWeight(
            bits,
            None if found[2] == "ROW" else group,
            np.zeros((1, width * bits // 8), np.uint8),
            scales,
            zeros=np.zeros(scales.shape, np.uint8) if found[3] else None,
            minima=scales if found[4] else None,
            column_order=np.arange(width, dtype=np.int32) if found[6] else None,
        )
    )


def vector_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type of vectors, such as norms, that go with matrices of `dtype`: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def plain_types(graph: Graph, dtype: torch.dtype) -> dict[Parameter, torch.dtype]:
    """Return the types of the weights that are held as plain numbers when values have `dtype`.

    Matrices have `dtype`, as do the biases of products with results in `dtype`, so that no step converts them. Other
    vectors, such as norms and the biases of logits, have at least float32.
    """
    biases: set[Parameter | None] = set()
    for op in (node.op for node in graph.nodes):
        if isinstance(op, Linear):
            biases.add(op.bias)
        elif isinstance(op, FusedLinear):
            biases.update(op.biases)
        elif isinstance(op, MoE):
            biases.add(op.router_bias)
    wide = vector_type(dtype)
    return {p: dtype if p.is_matrix or p in biases else wide for p in graph.parameters}


def is_coded(held: PackedType) -> bool:
    """Return True if a matrix is held as codes."""
    return held.packed_as == held.type_name and held.type_name not in DENSE_TYPES


def products_with_codes(graph: Graph, matrices: Mapping[Parameter, PackedType]) -> list[Parameter]:
    """Return the matrices [out, in] that are held as codes and multiplied by rows in this form."""
    ops = [node.op for node in graph.nodes]
    used = [p for op in ops if isinstance(op, Linear | FusedLinear) for p in op.parameters]
    used += [op.router for op in ops if isinstance(op, MoE)]
    return [p for p in dict.fromkeys(used) if p in matrices and len(p.shape) == 2 and is_coded(matrices[p])]


def multiplied_by_codes(matrices: Mapping[Parameter, PackedType]) -> frozenset[Parameter]:
    """Return the matrices of types that may require rows as codes. Only the weight itself shows whether it requires
    them.
    """
    kinds = re.compile(r"F8_E4M3(_.*)?|I8_ROW(_F32)?")
    return frozenset(p for p, held in matrices.items() if kinds.fullmatch(held.type_name))


def without_kernel(graph: Graph, *, has_kernels: bool) -> set[Parameter]:
    """Return the matrices that a product unpacks completely if they are held as codes.

    has_kernels: whether Triton kernels run. They do not include the product of each head with its own matrix.
    """
    ops = [node.op for node in graph.nodes]
    if has_kernels:
        return {op.weight for op in ops if isinstance(op, HeadLinear)}
    tables = (Embedding, PositionEmbedding, TokenTypeEmbedding)  # operations that look up rows
    return {p for op in ops if not isinstance(op, tables) for p in op.parameters}


def products_of(graph: Graph) -> list[tuple[Parameter, ...]]:
    """Return the matrices that share an input and are multiplied as one, such as q, k and v; each appears
    at most once.
    """
    found: list[tuple[Parameter, ...]] = []
    taken: set[Parameter] = set()
    for op in (node.op for node in graph.nodes if isinstance(node.op, FusedLinear)):
        is_alike = len({bias is None for bias in op.biases}) == 1
        members = [*op.weights, *(bias for bias in op.biases if bias is not None)]
        if len(op.weights) > 1 and is_alike and taken.isdisjoint(members) and len({*members}) == len(members):
            found += [op.weights, *([tuple(members[len(op.weights) :])] if op.biases[0] is not None else [])]
            taken.update(members)
    return found


class DeviceWeights:
    """All weights of a graph, each loaded once. The matrices of one product are stacked vertically in one tensor."""

    def __init__(
        self,
        graph: Graph,
        weights: Mapping[str, Weight],
        dtype: torch.dtype,
        device: torch.device,
        progress: LoadProgress | None = None,
        only: Sequence[Parameter] | None = None,
        computes_on: torch.device | None = None,
    ) -> None:
        """only: load only these weights of the graph; None means all.
        computes_on: device of the products, if it differs from `device`.
        """
        self.dtype = dtype
        self._tensors: dict[Parameter, Tensor] = {}
        self.planes: dict[Parameter, Planes] = {}  # matrices held as codes
        self._joined: dict[tuple[Parameter, ...], Planes | Tensor] = {}
        self.streamed: StreamedLayers | None = None  # layers whose weights are not always on the device
        parameters = graph.parameters if only is None else only
        types = plain_types(graph, dtype)
        place = {p: i for i, p in enumerate(parameters)}
        waiting = {
            max(group, key=place.__getitem__): group for group in products_of(graph) if place.keys() >= set(group)
        }
        ends = [*accumulate(parameter_info(weights, p).nbytes for p in parameters)]
        for parameter, loaded in zip(parameters, ends, strict=True):
            weight = weight_of(weights, parameter)
            planes = None
            if parameter.is_matrix and row_of_planes(weight.type_name, weight.shape) is not None:
                planes = planes_of(weight)
            if planes is None:
                self._tensors[parameter] = _tensor(weight, types[parameter], device)
            else:
                if planes.inputs is not None and not has_products_of(planes.inputs.kind, computes_on or device):
                    planes = replace(planes, inputs=None)
                self.planes[parameter] = planes.to(device)
            release(weights, parameter)
            if parameter in waiting:
                self._join(waiting[parameter])
            if progress is not None:
                progress(PACKING, loaded, ends[-1])
        self.nbytes = sum(x.nbytes for x in self._tensors.values()) + sum(p.nbytes for p in self.planes.values())

    def __getitem__(self, parameter: Parameter) -> Tensor:
        """Return the numbers of a weight; codes are unpacked on every call."""
        planes = self.planes.get(parameter)
        return self._tensors[parameter] if planes is None else whole(planes, self.dtype)

    def _join(self, group: tuple[Parameter, ...]) -> None:
        """Stack the weights of one product vertically if their types allow it; each is then a view."""
        rows = [p.shape[0] for p in group]
        if all(p in self._tensors for p in group):
            whole_tensor = torch.cat([self._tensors[p] for p in group])
            self._joined[group] = whole_tensor
            self._tensors.update(zip(group, torch.split(whole_tensor, rows), strict=True))
        elif all(p in self.planes for p in group):
            joined = joined_rows([self.planes[p] for p in group])
            if joined is not None:
                self._joined[group] = joined
                self.planes.update(zip(group, rows_apart(joined, rows), strict=True))

    def matrix(self, parameters: Sequence[Parameter]) -> Planes | Tensor | None:
        """Return matrices stacked vertically, [sum of out, in]; None means that their types differ."""
        if len(parameters) > 1:
            return self._joined.get(tuple(parameters))
        return self.planes.get(parameters[0], None) or self._tensors[parameters[0]]

    def vector(self, parameters: Sequence[Parameter | None]) -> Tensor | None:
        """Return the biases of `matrix`, one after another, or None if there are none."""
        given = tuple(p for p in parameters if p is not None)
        if len(given) > 1:
            found = self._joined[given]
            assert isinstance(found, Tensor)
            return found
        return self._tensors[given[0]] if given else None

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, including views of each other."""
        found = [*self._tensors.values(), *(x for x in self._joined.values() if isinstance(x, Tensor))]
        planes = [*self.planes.values(), *(x for x in self._joined.values() if isinstance(x, Planes))]
        return found + [tensor for each in planes for tensor in each.tensors.values()]

    def move(self, device: torch.device) -> None:
        """Move all weights to another device, bit by bit unchanged. Call between steps."""
        if self.streamed is not None:
            self.streamed.ring.settle()
        layout = Layout(self.tensors)
        is_pinned = device.type == "cpu" and any(tensor.is_cuda for tensor in self.tensors)
        buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device=device, pin_memory=is_pinned)
        layout.write(buffer)
        self.replace_tensors(partial(layout.view, buffer=buffer))
        if self.streamed is not None:
            self.streamed.ring.replace_places(partial(layout.view, buffer=buffer))

    def replace_tensors(self, moved: Callable[[Tensor], Tensor]) -> None:
        """Replace each tensor by another with the same shape, type and numbers."""

        def moved_planes(planes: Planes) -> Planes:
            tensors: dict[str, Any] = {name: moved(tensor) for name, tensor in planes.tensors.items()}
            return replace(planes, **tensors)

        self._tensors = {p: moved(x) for p, x in self._tensors.items()}
        self.planes = {p: moved_planes(x) for p, x in self.planes.items()}
        self._joined = {g: moved_planes(x) if isinstance(x, Planes) else moved(x) for g, x in self._joined.items()}

    def structure(self, parameters: Sequence[Parameter]) -> str:
        """Describe everything about tensors in one buffer except their numbers.

        parameters: all parameters of these weights, in the order by which the description numbers them.
        """
        place = {p: i for i, p in enumerate(parameters)}

        def of(held: Tensor | Planes) -> object:
            if isinstance(held, Tensor):
                return (held.dtype, tuple(held.shape), held.stride(), held.storage_offset())
            tensors = {name: of(tensor) for name, tensor in held.tensors.items()}
            return (tensors, {name: getattr(held, name) for name in held.__slots__ if name not in tensors})

        alone = {place[p]: of(x) for p, x in self._tensors.items()}
        alone |= {place[p]: of(x) for p, x in self.planes.items()}
        return repr((sorted(alone.items()), [([place[p] for p in g], of(x)) for g, x in self._joined.items()]))

    def as_those_of(self, names: Mapping[Parameter, Parameter]) -> DeviceWeights:
        """Return the same tensors under the names of other weights with the same structure.

        names: the other weight's parameter for each parameter of these weights.
        """
        other = copy(self)
        other._tensors = {names[p]: x for p, x in self._tensors.items()}
        other.planes = {names[p]: x for p, x in self.planes.items()}
        other._joined = {tuple(names[p] for p in g): x for g, x in self._joined.items()}
        return other

    def take(self, others: DeviceWeights) -> None:
        """Add the weights of `others`, which are for the same graph; `nbytes` does not change."""
        self._tensors.update(others._tensors)
        self.planes.update(others.planes)
        self._joined.update(others._joined)

    def in_turn(self, nodes: Sequence[Node]) -> Iterable[Node]:
        """Yield each node when its weights are ready."""
        return nodes if self.streamed is None else self.streamed.in_turn(nodes)

    def clear(self) -> None:
        """Free all weights."""
        if self.streamed is not None:
            self.streamed.close()
            self.streamed = None
        self._joined.clear()
        self._tensors.clear()
        self.planes.clear()
        self.nbytes = 0


def _tensor(weight: Weight, dtype: torch.dtype, device: torch.device) -> Tensor:
    if isinstance(weight, DenseWeight) and weight.data.dtype == np.uint16:
        stored = torch.from_numpy(np.ascontiguousarray(weight.data).view(np.int16).copy()).view(torch.bfloat16)
        return stored.to(device).to(dtype)
    return torch.tensor(weight.dequantize(), device=device).to(dtype).contiguous()  # kernels need contiguous rows
