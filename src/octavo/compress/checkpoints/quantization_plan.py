"""The matrices of a checkpoint that are quantized, and the layer that uses each of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from octavo.backends.layers import layers_of
from octavo.errors import UsageError
from octavo.graph.builder import Graph
from octavo.graph.values import Parameter
from octavo.loader.checkpoint import Checkpoint, checkpoint_name
from octavo.loader.tensor_files import Source, Weights
from octavo.loader.tensor_names import TensorName
from octavo.loader.transforms import transformed
from octavo.models import build_graph, load_architecture, weight_table
from octavo.models._weights import Fold, Permute, Split, Stack, Transform
from octavo.quantization.packed import DENSE_TYPES, DenseWeight, Weight

_SMALLEST_ROWS = 32
"""Matrices with fewer rows, such as the gate of a shared expert, are not worth quantizing."""
_KEEPS_COLUMNS = (Permute, Split, Stack, Fold)
"""Transforms that leave the columns of a matrix as they are in the file."""


@dataclass(frozen=True, slots=True)
class QuantizationPlan:
    """A model cut into layers, with the names of the stored matrices to quantize in each.

    layers: segments of the graph.
    matrices: matrices of each layer, in the order of its operations.
    left: matrices in the layers that keep their type.
    """

    checkpoint: Checkpoint
    layers: Sequence[Graph]
    matrices: Sequence[Sequence[str]]
    left: Sequence[str]

    @property
    def names(self) -> list[str]:
        """Names of all matrices to quantize."""
        return [name for layer in self.matrices for name in layer]

    def shape(self, tensor: str) -> tuple[int, ...]:
        return self.checkpoint.file.tensors[tensor].shape

    @property
    def skipped_modules(self) -> list[str]:
        """Modules whose matrix keeps its type, including the output head."""
        heads = [n for n in self.checkpoint.file.tensors if n.split(".")[-2:-1] == ["lm_head"]] or ["lm_head.weight"]
        return [name.removesuffix(".weight") for name in dict.fromkeys([*heads, *self.left])]

    def stored_name(self, parameter: Parameter, index: int | None = None) -> str | None:
        """Return the name of the stored tensor that a parameter, or matrix `index` of a stack, is read from.

        Returns None if a parameter is read from several tensors, or if a matrix is only a part of a stored stack.
        """
        tensors = self.checkpoint.weights.info(parameter.name).tensors
        if index is not None and len(tensors) == parameter.shape[0]:
            return tensors[index]
        return tensors[0] if len(tensors) == 1 and index is None else None

    def addend(self, tensor: str) -> float | None:
        """Return the constant that the model adds to a stored tensor, 0 if it adds none.

        Returns None if the model changes the tensor in another way, for example by reordering its rows.
        """
        found = _transforms(self, tensor)
        if all(isinstance(transform, Fold) for transform in found):
            return sum(transform.addend for transform in found if isinstance(transform, Fold))
        return None


def plan_quantization(checkpoint: Checkpoint, keep: Sequence[re.Pattern[str]]) -> QuantizationPlan:
    """Plan the quantization of a float checkpoint in safetensors files.

    keep: patterns of tensors that keep their type.

    Raises UsageError if the checkpoint is of another kind, a pattern matches no matrix, or the model stores its
    matrices in a layout that the formats do not support.
    """
    _check_source(checkpoint)
    graph = build_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes)
    layers = layers_of(graph)
    plan = QuantizationPlan(checkpoint, layers, (), ())
    found: list[list[str]] = []
    for layer in layers:
        tensors = [t for node in layer.nodes for p in node.op.products for t in checkpoint.weights.info(p.name).tensors]
        known = {name for names in found for name in names}
        found.append([name for name in dict.fromkeys(tensors) if name not in known and _can_be_quantized(plan, name)])
    names = [name for layer in found for name in layer]
    if not names:
        raise UsageError(
            f"{checkpoint.path}: it has no matrix that this type can quantize; its layers are stored "
            "transposed or as stacks: use a GGUF type, such as q4_k_m"
        )
    for pattern in keep:
        if not any(pattern.search(name) for name in names):
            raise UsageError(f"pattern {pattern.pattern!r} matches no matrix; names look like {names[0]}", param="keep")
    kept = {name for name in names if any(pattern.search(name) for pattern in keep)}
    matrices = [[name for name in layer if name not in kept] for layer in found]
    taken = {name for layer in matrices for name in layer}
    left = [name for name in checkpoint.file.tensors if name not in taken and _is_in_layer(plan, name)]
    return replace(plan, matrices=matrices, left=left)


def _check_source(checkpoint: Checkpoint) -> None:
    if checkpoint.format != "safetensors":
        raise UsageError(
            f"{checkpoint.path}: this type is made from a safetensors checkpoint: first octavo convert SRC FOLDER "
            "--to safetensors"
        )
    if checkpoint.quantization is not None:
        raise UsageError(f"{checkpoint.path}: already quantized by {checkpoint.quantization}; use the float checkpoint")
    for info in checkpoint.file.tensors.values():
        if len(info.shape) > 1 and info.type_name not in DENSE_TYPES:
            raise UsageError(
                f"{info.file}: tensor {info.name!r:.80} is {info.type_name}; one of {', '.join(DENSE_TYPES)} is needed"
            )


def _can_be_quantized(plan: QuantizationPlan, tensor: str) -> bool:
    """Return True if the tensor is a large enough matrix with the same columns in the file as in the graph."""
    shape = plan.shape(tensor)
    keeps_columns = all(isinstance(transform, _KEEPS_COLUMNS) for transform in _transforms(plan, tensor))
    return tensor.endswith(".weight") and len(shape) == 2 and shape[0] >= _SMALLEST_ROWS and keeps_columns


def _is_in_layer(plan: QuantizationPlan, tensor: str) -> bool:
    """Return True for a matrix inside a layer.

    Programs that read the checkpoint treat it as the weight of a linear layer.
    """
    return tensor.endswith(".weight") and len(plan.shape(tensor)) == 2 and bool(_graph_name(plan, tensor).numbers)


def _graph_name(plan: QuantizationPlan, tensor: str) -> TensorName:
    """Return the graph's name for a tensor, before the transforms."""
    table = weight_table(load_architecture(plan.checkpoint.architecture))
    return TensorName.parse(checkpoint_name(tensor, table))


def _transforms(plan: QuantizationPlan, tensor: str) -> list[Transform]:
    """Return the transforms applied to a stored tensor when it is loaded."""
    table = weight_table(load_architecture(plan.checkpoint.architecture))
    stem = _graph_name(plan, tensor).stem
    return [t for t in table.transforms if t.stem == stem and t.only in (None, "safetensors")]


class WorkingWeights:
    """The float32 weights of a checkpoint while it is being quantized: changed tensors replace the file's.

    Every look-up in `weights` computes the weight again.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.changed: dict[str, Weight] = {}
        self._file = checkpoint.file
        table = weight_table(load_architecture(checkpoint.architecture))
        used = [tensor for name in checkpoint.weights for tensor in checkpoint.weights.info(name).tensors]
        stored = {checkpoint_name(name, table): self._source(name) for name in dict.fromkeys(used)}
        made = transformed(stored, table.transforms, checkpoint.config, "safetensors")
        self.weights = Weights(MappingProxyType(made), checkpoint.file)

    def stored(self, name: str) -> NDArray[np.float32]:
        """Return the current numbers of a stored tensor."""
        weight = self.changed[name] if name in self.changed else self._file.weight(name)
        return weight.dequantize()

    def _source(self, name: str) -> Source:
        found = self._file.source(name)
        return replace(found, type_name="F32", make=lambda: DenseWeight(self.stored(name)))
