"""Converts the bytes of tensors to other types, piece by piece, on several threads."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from octavo.backends.quantizers import quantize
from octavo.errors import ModelWriteError
from octavo.quantization.packed import DENSE_TYPES, DenseWeight, GGMLWeight, Weight, check_finite

PIECE_VALUES = 1 << 19
"""Number of values to convert at a time. Temporaries take about four bytes per value."""

Importance = NDArray[np.float32]
"""[columns], or [experts, columns] for a stack of matrices."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """A tensor to convert to ggml type `type_name`.

    name: the tensor's name in error messages.
    make: returns the tensor to convert; called once, when it is the tensor's turn.
    """

    name: str
    shape: tuple[int, ...]
    make: Callable[[], DenseWeight | GGMLWeight]
    type_name: str
    importance: Importance | None = None


def encode(
    tensors: Sequence[Encoding], pool: ThreadPoolExecutor, threads: int
) -> Generator[Iterator[NDArray[np.uint8]]]:
    """Yield an iterator over the bytes of each tensor, in order. Consume one iterator before asking for the next.

    A tensor that already has the type keeps its bytes. The bytes do not depend on the number of threads. At most two
    pieces per thread are in memory.

    Raises ModelWriteError naming a tensor that cannot be converted. A float tensor with NaN or infinity is an error
    even if it is only copied.
    """
    queue = _Queue(tensors, pool, 2 * threads)
    try:
        for _ in tensors:
            yield queue.bytes_of_next()
    finally:
        queue.cancel()


class _Queue:
    """The pieces of all tensors, in order. At most `ahead` of them are being converted or wait to be consumed.

    Pieces of the next tensors are started before the current tensor is finished, so that small tensors keep all threads
    busy. A tensor with more than `ahead` pieces is not started before its turn, so that only one such tensor is in
    memory.
    """

    def __init__(self, tensors: Sequence[Encoding], pool: ThreadPoolExecutor, ahead: int) -> None:
        self._pool = pool
        self._ahead = ahead
        self._tensors = deque(tensors)  # tensors that have not been started
        self._tasks: Iterator[Callable[[], NDArray[np.uint8]] | None] = iter(())  # of the started tensor
        self._running: deque[Future[NDArray[np.uint8]] | None] = deque()  # None ends a tensor

    def bytes_of_next(self) -> Iterator[NDArray[np.uint8]]:
        while True:
            self._fill()
            if (future := self._running.popleft()) is None:
                return
            yield future.result()

    def _fill(self) -> None:
        while len(self._running) < self._ahead:
            for task in self._tasks:
                self._running.append(None if task is None else self._pool.submit(task))
                break
            else:
                if not self._tensors or (self._running and self._is_large(self._tensors[0])):
                    return
                self._tasks = _tasks(self._tensors.popleft())

    def _is_large(self, tensor: Encoding) -> bool:
        return math.prod(tensor.shape) > self._ahead * PIECE_VALUES

    def cancel(self) -> None:
        for future in self._running:
            if future is not None:
                future.cancel()


def _tasks(tensor: Encoding) -> Iterator[Callable[[], NDArray[np.uint8]] | None]:
    for piece in _pieces(tensor.make(), tensor.importance):
        yield partial(_encoded, tensor.name, *piece, tensor.type_name)
    yield None


def _pieces(
    weight: DenseWeight | GGMLWeight, importance: Importance | None
) -> Iterator[tuple[DenseWeight | GGMLWeight, Importance | None]]:
    """Yield rows from one matrix at a time, with the importance of their columns."""
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
        is_copy = piece.type_name == type_name
        if is_copy or type_name in DENSE_TYPES:
            values = piece.dequantize()
            check_finite(values)
            data = piece.data if is_copy else DenseWeight(values).converted(type_name).data
            return np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        numbers = piece.data if isinstance(piece, DenseWeight) else piece.dequantize()
        return quantize(type_name, numbers.reshape(math.prod(piece.shape[:-1]), -1), importance)
    except ValueError as error:
        raise ModelWriteError(f"tensor {name!r:.80} cannot become {type_name}: {error}") from error


def plain(weight: Weight) -> DenseWeight | GGMLWeight:
    """Return the weight in a type that a GGUF file can hold: its own if possible, otherwise float32."""
    return weight if isinstance(weight, DenseWeight | GGMLWeight) else DenseWeight(weight.dequantize())
