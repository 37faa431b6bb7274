"""The weights of a graph's parameters: their sizes before they are built, and the parts that the graph uses."""

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
    """A mapping of weights that builds each one from a file on access."""

    def info(self, name: str) -> WeightInfo:
        """Return the type and size of a weight without building it."""

    def fingerprint(self, name: str) -> bytes:
        """Return the transforms of a weight and a sample of its stored bytes, which together identify it."""

    def release(self, name: str) -> None:
        """Let the system reclaim this weight's pages once it is packed."""


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """The type and size of a parameter's weight, or of the part that it uses.

    nbytes: stored size.
    """

    type_name: str
    nbytes: int


def parameter_info(weights: Mapping[str, Weight], parameter: Parameter) -> ParameterInfo:
    """Return the type and size of the weight that `weight_of` returns."""
    info: WeightInfo = weights.info(parameter.name) if isinstance(weights, StoredWeights) else weights[parameter.name]
    part, nbytes = parameter.part, info.nbytes
    if part is not None:
        nbytes = nbytes * part.count // info.shape[part.dimension]
    return ParameterInfo(info.type_name, nbytes)


def weight_of(weights: Mapping[str, Weight], parameter: Parameter) -> Weight:
    """Return the weight of a parameter, or the part of it that the parameter names.

    Raises GraphError if the weight cannot be cut into such parts, or if its shape differs from the graph's.
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
    """Return `Weight.column_step` of a weight, without building the weight if its type is enough to tell."""
    if isinstance(weights, StoredWeights):
        type_name = weights.info(name).type_name
        if type_name in DENSE_TYPES:
            return 1
        if type_name in BLOCK_SIZES:
            return BLOCK_SIZES[type_name][0]
    return weights[name].column_step


def fingerprint_of(weights: Mapping[str, Weight], parameter: Parameter) -> bytes:
    """Return 16 bytes that identify a weight, its type, the transforms that build it, and the part that is used."""
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
