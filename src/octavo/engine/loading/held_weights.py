"""A checkpoint's weights in the types in which they are held, as set by `--dtype` and `--quantization`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from octavo.errors import ModelLoadError
from octavo.loader.tensor_files import Source, Weights
from octavo.quantization import at_load
from octavo.quantization.packed import DENSE_TYPES, DenseWeight, Weight

if TYPE_CHECKING:
    from octavo.graph.builder import Graph
    from octavo.loader.checkpoint import Checkpoint

_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def held_weights(checkpoint: Checkpoint, graph: Graph, dtype: str = "auto", quantization: str | None = None) -> Weights:
    """Return the weights of `checkpoint`. Each is converted when it is read.

    graph: the model's graph. Its operations tell which matrices are worth quantizing (`Op.products`).
    dtype: `auto`, or the number type of all matrices that are not quantized.
    quantization: one of `octavo.quantization.at_load.METHODS`.
    Raises ModelLoadError for a checkpoint that is quantized already. Reading a weight raises ModelLoadError naming a
    tensor with numbers that the type cannot represent.
    """
    weights = checkpoint.weights
    matrices = [p.name for p in graph.parameters if p.is_matrix and p.name in weights]
    changed: dict[str, Source] = {}
    if quantization is not None:
        names = {parameter.name for node in graph.nodes for parameter in node.op.products}
        changed = {name: _quantized(weights.info(name), quantization) for name in _plain(checkpoint, names)}
    if dtype != "auto":
        for name in matrices:
            if name not in changed and weights.info(name).type_name in {*DENSE_TYPES} - {_TYPES[dtype]}:
                changed[name] = _converted(weights.info(name), _TYPES[dtype])
    return weights.replaced(changed) if changed else weights


def _plain(checkpoint: Checkpoint, names: Iterable[str]) -> Iterable[str]:
    """Check these names and return them. Raises ModelLoadError if a weight is quantized in the file."""
    quantized = checkpoint.quantization or next(
        (info.type_name for name in names if (info := checkpoint.weights.info(name)).type_name not in DENSE_TYPES), None
    )
    if quantized is not None:
        raise ModelLoadError(
            f"{checkpoint.path}: the weights are already quantized ({quantized}); leave the option quantization out, "
            "or use the model with float32, float16 or bfloat16 weights"
        )
    return names


def _quantized(source: Source, method: str) -> Source:
    def quantize(weight: Weight) -> Weight:
        return at_load.quantized(weight, method)

    try:
        like = at_load.quantized_like(source.shape, method)
    except ValueError as error:
        raise _error(source, error) from error
    return replace(
        _changed(source, quantize, f"quantized as {method} {at_load.VERSION}"),
        type_name=like.type_name,
        nbytes=like.nbytes,
    )


def _converted(source: Source, type_name: str) -> Source:
    def convert(weight: Weight) -> Weight:
        assert isinstance(weight, DenseWeight)
        return weight.converted(type_name)

    nbytes = int(np.prod(source.shape)) * np.dtype(DENSE_TYPES[type_name]).itemsize
    return replace(_changed(source, convert, f"as {type_name}"), type_name=type_name, nbytes=nbytes)


def _changed(source: Source, change: Callable[[Weight], Weight], step: str) -> Source:
    def make() -> Weight:
        weight = source.make()
        try:
            return change(weight)
        except ValueError as error:
            raise _error(source, error) from error

    return replace(source, make=make, steps=f"{source.steps} {step}")


def _error(source: Source, reason: ValueError) -> ModelLoadError:
    return ModelLoadError(f"tensor {source.tensors[0]!r:.100}: {reason}")
