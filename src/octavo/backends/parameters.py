"""The weights of a graph's parameters: their size before they are made, and the parts that the graph uses."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from octavo.errors import GraphError
from octavo.graph.values import Parameter
from octavo.quantization.ggml import BLOCK_SIZES
from octavo.quantization.packed import DENSE_TYPES, DenseWeight, Weight, WeightInfo, arrays_of


@runtime_checkable
class StoredWeights(Protocol):
    """A mapping of weights that makes each from a file when it is asked for."""

    def info(self, name: str) -> WeightInfo:
        """Type and size of a weight, without making it."""

    def fingerprint(self, name: str) -> bytes:
        """The transforms of a weight and a sample of its stored bytes, which together identify it."""

    def release(self, name: str) -> None:
        """Let the system reclaim the pages of this weight, once it is packed."""


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """A parameter's weight, or part of one.

    nbytes: as stored.
    """

    type_name: str
    nbytes: int


def parameter_info(weights: Mapping[str, Weight], parameter: Parameter) -> ParameterInfo:
    """Type and size of the weight that `weight_of` makes."""
    info: WeightInfo = weights.info(parameter.name) if isinstance(weights, StoredWeights) else weights[parameter.name]
    part, nbytes = parameter.part, info.nbytes
    if part is not None:
        nbytes = nbytes * part.count // info.shape[part.dimension]
    return ParameterInfo(info.type_name, nbytes)


def weight_of(weights: Mapping[str, Weight], parameter: Parameter) -> Weight:
    """The weight of a parameter, or the part of it that the parameter names.

    Raises GraphError if it cannot be cut there, or if its shape differs from the graph's.
    """
    weight = weights[parameter.name]
    part, dimensions = parameter.part, len(weight.shape)
    if part is not None:
        size = weight.shape[part.dimension]
        if not all(0 <= begin < end <= size for begin, end in part.ranges) or (part.more and dimensions > 1):
            raise GraphError(f"weight {parameter.label} of {list(weight.shape)} has no such part")
        if part.more:
            weight = DenseWeight(np.concatenate([weight.rows(slice(*each)).dequantize() for each in part.ranges]))
        elif part.dimension == max(dimensions - 2, 0):
            weight = weight.rows(slice(part.begin, part.end))
        elif part.dimension == dimensions - 1:
            try:
                weight = weight.columns(part.begin, part.end)
            except ValueError as error:
                raise GraphError(f"weight {parameter.label}: {error}") from None
        else:
            weight = weight.experts(part.begin, part.end)
    if weight.shape != parameter.shape:
        raise GraphError(
            f"weight {parameter.label} has shape {list(weight.shape)}, the graph uses it as {list(parameter.shape)}"
        )
    return weight


def column_step(weights: Mapping[str, Weight], name: str) -> int:
    """`Weight.column_step` of a weight, without making it where its type says enough."""
    if isinstance(weights, StoredWeights):
        type_name = weights.info(name).type_name
        if type_name in DENSE_TYPES:
            return 1
        if type_name in BLOCK_SIZES:
            return BLOCK_SIZES[type_name][0]
    return weights[name].column_step


def fingerprint_of(weights: Mapping[str, Weight], parameter: Parameter) -> bytes:
    """16 bytes that identify a weight, its type, the transforms that make it, and the part of it."""
    description = repr((parameter.part, parameter_info(weights, parameter)))
    digest = hashlib.blake2b(description.encode(), digest_size=16)
    if isinstance(weights, StoredWeights):
        digest.update(weights.fingerprint(parameter.name))
    else:
        for array in arrays_of(weights[parameter.name]).values():
            digest.update(np.ascontiguousarray(array).data)
    return digest.digest()


def release(weights: Mapping[str, Weight], parameter: Parameter) -> None:
    """Let the system reclaim the pages of a packed weight, if it is in a mapped file."""
    if isinstance(weights, StoredWeights):
        weights.release(parameter.name)
