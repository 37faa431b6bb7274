"""Brings the matrices of a model into the layout of the native kernels: packed here, or mapped as packed before."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from octavo.backends.cpu import _native
from octavo.backends.cpu.pack_cache import Matrix, PackCache
from octavo.config import LoadProgress
from octavo.errors import GraphError
from octavo.graph.values import Parameter
from octavo.quantization.packed import DenseWeight, GGMLWeight, Weight

if TYPE_CHECKING:
    from octavo.backends import PackCacheOptions

logger = logging.getLogger(__name__)


_LARGEST_F16 = 65504.0


@runtime_checkable
class ReleasesPages(Protocol):
    """A mapping of weights over a mapped file that can give the pages of one weight back."""

    def release(self, name: str) -> None: ...


class _Meter:
    """Tells `progress` of bytes that any thread is done with, one at a time."""

    def __init__(self, total: int, progress: LoadProgress | None) -> None:
        self._total = total
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if self._progress is not None:
                self._progress(self._done, self._total)


def load_matrices(
    weights: Mapping[str, Weight],
    matrices: Iterable[Parameter],
    num_threads: int,
    progress: LoadProgress | None,
    pack_cache: PackCacheOptions | None,
) -> dict[str, _native.PackedWeight]:
    """Each of `matrices` once, packed. With a pack cache they are mapped from it, and kept there if they were not.

    progress: called with (bytes done, bytes in all), from the threads at work, one at a time.
    """
    parameters = sorted({p.name: p for p in matrices}.values(), key=lambda p: -weights[p.name].nbytes)
    if pack_cache is None:
        return _pack_all(weights, parameters, num_threads, progress)
    described = [_describe(weights[p.name], p) for p in parameters]
    cache = PackCache(pack_cache.identity, pack_cache.limit_bytes, described)
    meter = _Meter(sum(matrix.stored.size for matrix in described), progress)
    mapped = cache.load(num_threads, meter.add)
    if mapped is not None:
        return mapped
    packed = _pack_all(weights, parameters, num_threads, progress)
    # The mapping has what was written, so this start is as the next one, and shares its memory with it.
    kept = cache.load(num_threads, _Meter(0, None).add) if cache.store(packed) else None
    return packed if kept is None else kept


def _pack_all(
    weights: Mapping[str, Weight], parameters: Sequence[Parameter], num_threads: int, progress: LoadProgress | None
) -> dict[str, _native.PackedWeight]:
    """Packs in the order given, the largest first so that the threads end together. Gives source pages back."""
    meter = _Meter(sum(weights[p.name].nbytes for p in parameters), progress)
    slow_types: set[str] = set()

    def pack(parameter: Parameter) -> _native.PackedWeight:
        weight = weights[parameter.name]
        packed = _pack(weight, parameter)
        if isinstance(weights, ReleasesPages):
            weights.release(parameter.name)
        if weight.type_name not in _native.packable_types():
            slow_types.add(weight.type_name)
        meter.add(weight.nbytes)
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
    matrix = _describe(weight, parameter)
    n, k = matrix.n, matrix.k
    if matrix.packed_types == (weight.type_name,):
        return _native.pack_weight(weight.type_name, matrix.stored, n, k)
    values = weight.dequantize()
    if np.abs(values).max(initial=0.0) <= _LARGEST_F16:
        return _native.pack_weight("F16", values.astype(np.float16).view(np.uint8).reshape(-1), n, k)
    return _native.pack_weight("F32", np.ascontiguousarray(values).view(np.uint8).reshape(-1), n, k)


def _describe(weight: Weight, parameter: Parameter) -> Matrix:
    """What a matrix is before it is packed. Types without a kernel become floats, as narrow as their values allow."""
    _check_shape(weight, parameter)
    n, k = math.prod(parameter.shape[:-1]), parameter.shape[-1]
    data = weight.data if isinstance(weight, (DenseWeight, GGMLWeight)) else weight.dequantize()
    stored = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
    packed_types = (weight.type_name,) if weight.type_name in _native.packable_types() else ("F16", "F32")
    return Matrix(parameter.name, weight.type_name, packed_types, n, k, stored)


def _check_shape(weight: Weight, parameter: Parameter) -> None:
    if weight.shape != parameter.shape:
        raise GraphError(
            f"weight {parameter.name} has shape {list(weight.shape)}, the graph uses it as {list(parameter.shape)}"
        )
