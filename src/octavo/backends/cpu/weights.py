"""Converts the matrices of a model to the layout of the native kernels, or maps matrices that were packed earlier."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo.backends import CHECKING, PACKING
from octavo.backends.cpu import _native
from octavo.backends.cpu.pack_cache import Matrix, PackCache
from octavo.backends.cpu.packing import pack, packed_types
from octavo.backends.parameters import fingerprint_of, parameter_info, release, weight_of
from octavo.config import LoadProgress
from octavo.errors import InsufficientMemoryError
from octavo.graph.values import Parameter
from octavo.quantization.packed import Weight

if TYPE_CHECKING:
    from octavo.backends import PackCacheOptions

_AHEAD = 4  # matrices, for each thread, that may be packed before the ones before them are written
_LEAST_KEPT_BYTES = 16 << 20  # packing anything smaller is faster than reading its file, so it is kept only on request


def load_matrices(
    weights: Mapping[str, Weight],
    matrices: Iterable[Parameter],
    num_threads: int,
    progress: LoadProgress | None,
    pack_cache: PackCacheOptions | None,
) -> dict[Parameter, _native.PackedWeight]:
    """Pack each of `matrices` once. With a pack cache, they are mapped from it, or stored in it if missing.

    Each thread builds and packs one matrix at a time. For the pack cache, matrices are either written as they are
    packed, so that only a few are in memory, or later by a job (`PackCacheOptions.later`).
    progress: called with (phase, bytes done, total bytes) at the start and after each matrix, largest first.
    Raises InsufficientMemoryError if the cache cannot be kept and only part of the weights may stay in memory.
    """
    nbytes = {p: parameter_info(weights, p).nbytes for p in matrices}
    parameters = _largest_first(weights, nbytes)

    total = sum(nbytes.values())

    def reported(packed: Iterable[_native.PackedWeight], phase: str = PACKING) -> Iterator[_native.PackedWeight]:
        report = progress or (lambda *_: None)
        report(phase, done := 0, total)
        for parameter, weight in zip(parameters, packed, strict=True):
            report(phase, done := done + nbytes[parameter], total)
            yield weight

    later = None if pack_cache is None else pack_cache.later
    if later is not None and total < _LEAST_KEPT_BYTES:
        pack_cache = None
    if pack_cache is not None:
        cache = pack_cache_of(weights, parameters, pack_cache)
        kept = cache.load(num_threads, lambda packed: reported(packed, CHECKING))
        if kept is None and later is None:
            with closing(_packed(weights, parameters, num_threads, _AHEAD * num_threads)) as packed:
                is_stored = cache.store(reported(packed))
            # Map the written file, so that this start has the same memory as the next one and shares it.
            kept = cache.load(num_threads, iter) if is_stored else None
        if kept is not None:
            return dict(zip(parameters, kept, strict=True))
        if pack_cache.resident_bytes is not None:
            raise InsufficientMemoryError(
                f"{cache.path}: the model does not fit in memory, and its packed weights could not be saved to disk to "
                "run from there; the warnings say why"
            )
    found = list(reported(_packed(weights, parameters, num_threads, len(parameters))))
    if pack_cache is not None and later is not None:
        later.append(partial(_keep, cache, found))
    return dict(zip(parameters, found, strict=True))


class _GivenUpError(Exception):
    """Raised to abandon writing the weights."""


def _keep(cache: PackCache, packed: Sequence[_native.PackedWeight], gives_up: Callable[[], bool]) -> None:
    def wanted() -> Iterator[_native.PackedWeight]:
        for weight in packed:
            if gives_up():
                raise _GivenUpError
            yield weight

    with suppress(_GivenUpError):
        cache.store(wanted())


def pack_cache_of(weights: Mapping[str, Weight], matrices: Iterable[Parameter], options: PackCacheOptions) -> PackCache:
    """Return the pack cache file of a model's matrices."""
    return PackCache(options, [_describe(weights, p) for p in _largest_first(weights, matrices)])


def _largest_first(weights: Mapping[str, Weight], matrices: Iterable[Parameter]) -> list[Parameter]:
    """Return each matrix once, the largest first."""
    nbytes = {p: parameter_info(weights, p).nbytes for p in matrices}
    return sorted(nbytes, key=lambda p: (-nbytes[p], p.label))


def _packed(
    weights: Mapping[str, Weight], parameters: Sequence[Parameter], num_threads: int, ahead: int
) -> Generator[_native.PackedWeight, None, None]:
    """Pack in the given order, largest first, so that the threads finish together. Release the pages of the source.

    ahead: number of matrices that are packed, or being packed, before the caller takes the first of them.
    """

    def pack_one(parameter: Parameter) -> _native.PackedWeight:
        packed = pack(weight_of(weights, parameter))
        release(weights, parameter)
        return packed

    waiting: deque[Future[_native.PackedWeight]] = deque()
    executor = ThreadPoolExecutor(num_threads, "octavo-pack")
    try:
        for parameter in parameters:
            if len(waiting) == ahead:
                yield waiting.popleft().result()
            waiting.append(executor.submit(pack_one, parameter))
        while waiting:
            yield waiting.popleft().result()
    finally:
        executor.shutdown(cancel_futures=True)


def plain_weight(weights: Mapping[str, Weight], parameter: Parameter) -> NDArray[np.float32]:
    """Return a vector (norm, bias, sinks), or a table of vectors one after another, as contiguous float32 [n]."""
    return np.ascontiguousarray(weight_of(weights, parameter).dequantize(), np.float32).reshape(-1)


def _describe(weights: Mapping[str, Weight], parameter: Parameter) -> Matrix:
    """Describe a matrix before packing, for the pack cache."""
    n, k = math.prod(parameter.shape[:-1]), parameter.shape[-1]
    types = packed_types(parameter_info(weights, parameter).type_name, parameter.shape)
    return Matrix(parameter.label, types, n, k, fingerprint_of(weights, parameter))
