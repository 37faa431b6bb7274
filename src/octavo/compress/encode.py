"""The bytes of a tensor in another type, piece by piece, on several threads."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray

from octavo.backends.quantizers import quantize
from octavo.errors import ModelWriteError
from octavo.quantization.packed import DENSE_TYPES, DenseWeight, GGMLWeight, Weight, check_finite

PIECE_VALUES = 1 << 19
"""Values that are converted at a time: their temporaries take about four bytes each."""

Importance = NDArray[np.float32]
"""[columns], or [experts, columns] of a stack of matrices."""


def encode(
    name: str,
    weight: DenseWeight | GGMLWeight,
    type_name: str,
    importance: Importance | None,
    pool: ThreadPoolExecutor,
    threads: int,
) -> Iterator[NDArray[np.uint8]]:
    """The bytes of `weight` as ggml type `type_name`, in order. The same bytes if it has that type already.

    name: of the tensor, for errors. The bytes are the same for every number of threads. At most two pieces for each
    thread are in memory. Raises ModelWriteError naming the tensor, also for a NaN or an infinity in one that is copied.
    """
    tasks = (partial(_encoded, name, *piece, type_name) for piece in _pieces(weight, importance))
    return _in_order(tasks, pool, 2 * threads)


def _pieces(
    weight: DenseWeight | GGMLWeight, importance: Importance | None
) -> Iterator[tuple[DenseWeight | GGMLWeight, Importance | None]]:
    """Rows of one matrix each, with the importance of their columns."""
    if len(weight.shape) > 2:
        for i in range(weight.shape[0]):
            part = dataclasses.replace(weight, data=weight.data[i])
            yield from _pieces(part, importance[i] if importance is not None and importance.ndim > 1 else importance)
        return
    rows = max(1, PIECE_VALUES // weight.shape[-1])
    if len(weight.shape) == 1:
        yield weight, None
        return
    for begin in range(0, weight.shape[0], rows):
        yield weight.rows(slice(begin, begin + rows)), importance


def _encoded(
    name: str, piece: DenseWeight | GGMLWeight, importance: Importance | None, type_name: str
) -> NDArray[np.uint8]:
    try:
        values = piece.dequantize()
        is_copy = piece.type_name == type_name
        if is_copy or type_name in DENSE_TYPES:
            check_finite(values)
        if is_copy:
            return np.ascontiguousarray(piece.data).reshape(-1).view(np.uint8)
        if type_name in DENSE_TYPES:
            return np.ascontiguousarray(DenseWeight(values).converted(type_name).data).reshape(-1).view(np.uint8)
        return quantize(type_name, values.reshape(math.prod(values.shape[:-1]), -1), importance)
    except ValueError as error:
        raise ModelWriteError(f"tensor {name!r:.80} cannot become {type_name}: {error}") from error


def _in_order(
    tasks: Iterator[Callable[[], NDArray[np.uint8]]], pool: ThreadPoolExecutor, ahead: int
) -> Iterator[NDArray[np.uint8]]:
    """The results of tasks in order, of which up to `ahead` run or wait."""
    running: deque[Future[NDArray[np.uint8]]] = deque()
    try:
        for task in tasks:
            running.append(pool.submit(task))
            if len(running) >= ahead:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        for future in running:
            future.cancel()


def plain(weight: Weight) -> DenseWeight | GGMLWeight:
    """The weight as a GGUF file can hold it: its own type, else float32."""
    return weight if isinstance(weight, DenseWeight | GGMLWeight) else DenseWeight(weight.dequantize())
