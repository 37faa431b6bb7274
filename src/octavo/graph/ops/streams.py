"""Operations on parts of the columns, such as parallel streams of hidden states, learned factors and the largest values
of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from octavo.batch import Array
from octavo.graph.cuts import COLUMNWISE, ColumnRange, Cut
from octavo.graph.ops.base import Evaluation, Op, StepSizes, describe, require
from octavo.graph.values import Parameter, RowDomain, Value


@dataclass(frozen=True, slots=True)
class Columns(Op):
    """The columns [begin, begin + count)."""

    row_wise: ClassVar[bool] = True
    cut: ClassVar[Cut[Any]] = ColumnRange()

    x: Value
    begin: int
    count: int

    def infer_shape(self) -> tuple[RowDomain, int]:
        fits = self.begin >= 0 and 0 < self.count <= self.x.cols - self.begin
        require(fits, f"x {describe(self.x)} has no {self.count} columns from {self.begin} on")
        return self.x.rows, self.count

    def evaluate(self, step: Evaluation) -> Array:
        return step.values[self.x][:, self.begin : self.begin + self.count]


@dataclass(frozen=True, slots=True)
class SideBySide(Op):
    """The columns of a, followed by the columns of b."""

    row_wise: ClassVar[bool] = True

    a: Value
    b: Value

    def infer_shape(self) -> tuple[RowDomain, int]:
        require(self.a.rows is self.b.rows, f"a {describe(self.a)} and b {describe(self.b)} have different rows")
        return self.a.rows, self.a.cols + self.b.cols

    def evaluate(self, step: Evaluation) -> Array:
        return np.concatenate([step.values[self.a], step.values[self.b]], axis=1)


@dataclass(frozen=True, slots=True)
class MixStreams(Op):
    """x_i + sum over j of coefficients[i, j] * x_j for each of n streams x_i: the prediction of AltUp.

    Baykal et al., arXiv 2301.13310.
    """

    row_wise: ClassVar[bool] = True

    x: Value  # [rows, n * width], stream by stream
    coefficients: Value  # [rows, n * n]

    def infer_shape(self) -> tuple[RowDomain, int]:
        n = self._streams
        fits = self.x.rows is self.coefficients.rows and n * n == self.coefficients.cols and self.x.cols % n == 0
        require(
            fits,
            f"coefficients {describe(self.coefficients)} do not make a square for the streams of {describe(self.x)}",
        )
        return self.x.rows, self.x.cols

    @property
    def _streams(self) -> int:
        return math.isqrt(self.coefficients.cols)

    def flops(self, sizes: StepSizes) -> int:
        return sizes.rows(self.x.rows) * self.x.cols * 2 * self._streams

    def evaluate(self, step: Evaluation) -> Array:
        x, n = step.values[self.x], self._streams
        streams = x.reshape(len(x), n, self.x.cols // n)
        mixed = streams + step.values[self.coefficients].reshape(len(x), n, n) @ streams
        return np.asarray(mixed.reshape(x.shape))


@dataclass(frozen=True, slots=True)
class AddToStreams(Op):
    """x_i + (coefficients_i + offsets_i) * y for each of n streams x_i: the correction of AltUp, arXiv 2301.13310."""

    row_wise: ClassVar[bool] = True
    element_flops: ClassVar[int] = 2

    x: Value  # [rows, n * width], stream by stream
    y: Value  # [rows, width]
    coefficients: Value | None  # [rows, n]; None means zeros
    offsets: tuple[float, ...]  # [n]

    def infer_shape(self) -> tuple[RowDomain, int]:
        n, c = len(self.offsets), self.coefficients
        fits = self.x.rows is self.y.rows and self.x.cols == n * self.y.cols
        require(fits, f"x {describe(self.x)} is not {n} streams of y {describe(self.y)}")
        require(bool(np.isfinite(self.offsets).all()), f"offsets {self.offsets} are not finite")
        if c is not None:
            require(c.rows is self.x.rows and c.cols == n, f"coefficients {describe(c)} are not one for each of {n}")
        return self.x.rows, self.x.cols

    @property
    def in_place(self) -> tuple[Value, ...]:
        return (self.x,)

    def evaluate(self, step: Evaluation) -> Array:
        x, n = step.values[self.x], len(self.offsets)
        factors = np.asarray(self.offsets, x.dtype)
        if self.coefficients is not None:
            factors = factors + step.values[self.coefficients]
        added = np.broadcast_to(factors, (len(x), n))[:, :, None] * step.values[self.y][:, None]
        return np.asarray(x + added.reshape(x.shape))


@dataclass(frozen=True, slots=True)
class MatchMagnitude(Op):
    """Each stream of x, scaled to the root mean square of the target: used where Gemma 3n's streams begin and end."""

    row_wise: ClassVar[bool] = True
    element_flops: ClassVar[int] = 4

    x: Value  # [rows, n * width]
    target: Value  # [rows, width]
    floor: float  # minimum mean square of a stream

    def infer_shape(self) -> tuple[RowDomain, int]:
        fits = self.x.rows is self.target.rows and self.x.cols % self.target.cols == 0
        require(fits, f"x {describe(self.x)} is not several times as wide as the target {describe(self.target)}")
        require(self.floor > 0, f"floor {self.floor} is not positive")
        return self.x.rows, self.x.cols

    def evaluate(self, step: Evaluation) -> Array:
        x, target = step.values[self.x], step.values[self.target]
        streams = x.reshape(len(x), self.x.cols // self.target.cols, self.target.cols)
        own = np.maximum(np.mean(streams * streams, axis=-1, keepdims=True), self.floor)
        wanted = np.mean(target * target, axis=-1)[:, None, None]
        return np.asarray((streams * np.sqrt(wanted) / np.sqrt(own)).reshape(x.shape))


@dataclass(frozen=True, slots=True)
class ScaleColumns(Op):
    """x * weight, with one factor for each column or a single one for all."""

    row_wise: ClassVar[bool] = True
    element_flops: ClassVar[int] = 1
    cut: ClassVar[Cut[Any]] = COLUMNWISE

    x: Value
    weight: Parameter  # [cols] or [1]

    def infer_shape(self) -> tuple[RowDomain, int]:
        fits = self.weight.shape in ((self.x.cols,), (1,))
        require(fits, f"x {describe(self.x)} does not fit {self.weight.name} {list(self.weight.shape)}")
        return self.x.rows, self.x.cols

    @property
    def in_place(self) -> tuple[Value, ...]:
        return (self.x,)

    def evaluate(self, step: Evaluation) -> Array:
        return step.values[self.x] * step.weights[self.weight]


@dataclass(frozen=True, slots=True)
class Sparsify(Op):
    """max(0, x - mean - deviations * standard deviation) of each row: what exceeds a quantile of a normal distribution.

    Spark Transformer, arXiv 2506.06644: a top-k without sorting.
    """

    row_wise: ClassVar[bool] = True
    element_flops: ClassVar[int] = 6

    x: Value
    deviations: float

    def infer_shape(self) -> tuple[RowDomain, int]:
        require(math.isfinite(self.deviations), f"deviations {self.deviations} is not finite")
        return self.x.rows, self.x.cols

    def evaluate(self, step: Evaluation) -> Array:
        x = step.values[self.x]
        cut = x.mean(axis=-1, keepdims=True) + self.deviations * x.std(axis=-1, keepdims=True)
        return np.asarray(np.maximum(x - cut, 0.0))
