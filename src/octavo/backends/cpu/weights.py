"""Packs the matrices of a model for the native kernels, in parallel, giving source pages back on the way."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from octavo.backends.cpu import _native
from octavo.errors import GraphError
from octavo.graph.values import Parameter
from octavo.quantization.packed import DenseWeight, GGMLWeight, Weight

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]

_LARGEST_F16 = 65504.0


@runtime_checkable
class ReleasesPages(Protocol):
    """A mapping of weights over a mapped file that can give the pages of one weight back."""

    def release(self, name: str) -> None: ...


def pack_matrices(
    weights: Mapping[str, Weight], matrices: Iterable[Parameter], num_threads: int, progress: Progress | None
) -> dict[str, _native.PackedWeight]:
    """Packs each of `matrices` once, the largest first so that the threads end together.

    progress: called with (bytes done, bytes in all), from the packing threads, one at a time.
    """
    sizes = {p.name: weights[p.name].nbytes for p in matrices}
    parameters = sorted({p.name: p for p in matrices}.values(), key=lambda p: -sizes[p.name])
    total, done = sum(sizes.values()), 0
    slow_types: set[str] = set()
    lock = threading.Lock()

    def pack(parameter: Parameter) -> _native.PackedWeight:
        nonlocal done
        weight = weights[parameter.name]
        packed = _pack(weight, parameter)
        if isinstance(weights, ReleasesPages):
            weights.release(parameter.name)
        with lock:
            if weight.type_name not in _native.packable_types():
                slow_types.add(weight.type_name)
            done += weight.nbytes
            if progress is not None:
                progress(done, total)
        return packed

    with ThreadPoolExecutor(num_threads, "octavo-pack") as executor:
        packed = dict(zip((p.name for p in parameters), executor.map(pack, parameters), strict=True))
    for type_name in sorted(slow_types):
        logger.info("%s has no kernel of its own: its weights are kept as 16-bit or 32-bit floats", type_name)
    return packed


def plain_weight(weights: Mapping[str, Weight], parameter: Parameter) -> NDArray[np.float32]:
    """A vector (norm, bias, sinks) as contiguous float32 [n]."""
    weight = weights[parameter.name]
    _check_shape(weight, parameter)
    return np.ascontiguousarray(weight.dequantize(), np.float32).reshape(-1)


def _pack(weight: Weight, parameter: Parameter) -> _native.PackedWeight:
    """[product of the leading dimensions, last dimension] in the layout of the kernels."""
    _check_shape(weight, parameter)
    n, k = math.prod(parameter.shape[:-1]), parameter.shape[-1]
    if weight.type_name in _native.packable_types() and isinstance(weight, (DenseWeight, GGMLWeight)):
        data = np.ascontiguousarray(weight.data).view(np.uint8).reshape(-1)
        return _native.pack_weight(weight.type_name, data, n, k)
    values = weight.dequantize()
    if np.abs(values).max(initial=0.0) <= _LARGEST_F16:
        return _native.pack_weight("F16", values.astype(np.float16).view(np.uint8).reshape(-1), n, k)
    return _native.pack_weight("F32", np.ascontiguousarray(values).view(np.uint8).reshape(-1), n, k)


def _check_shape(weight: Weight, parameter: Parameter) -> None:
    if weight.shape != parameter.shape:
        raise GraphError(
            f"weight {parameter.name} has shape {list(weight.shape)}, the graph uses it as {list(parameter.shape)}"
        )
