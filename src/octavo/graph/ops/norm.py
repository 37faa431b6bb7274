"""Normalizations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from octavo.batch import Array
from octavo.graph.ops.base import Evaluation, Op, describe, require, require_parameter
from octavo.graph.values import Parameter, Rows, Value


@dataclass(frozen=True, slots=True)
class RMSNorm(Op):
    """x / rms(x) * weight, over groups of weight.shape[0] columns (heads).

    Zhang and Sennrich, arXiv 1910.07467; eps is added to the mean square.
    """

    row_wise: ClassVar[bool] = True
    element_flops: ClassVar[int] = 4

    x: Value
    weight: Parameter  # [group]; group divides x.cols
    eps: float

    def infer_shape(self) -> tuple[Rows, int]:
        require(
            len(self.weight.shape) == 1 and self.x.cols % self.weight.shape[0] == 0,
            f"x {describe(self.x)} is not a multiple of {self.weight.name} {list(self.weight.shape)}",
        )
        return self.x.rows, self.x.cols

    def evaluate(self, step: Evaluation) -> Array:
        return rms_norm(step.values[self.x], step.weights[self.weight], self.eps)


@dataclass(frozen=True, slots=True)
class LayerNorm(Op):
    """(x - mean) / sqrt(variance + eps) * weight + bias. Ba et al., arXiv 1607.06450."""

    row_wise: ClassVar[bool] = True
    element_flops: ClassVar[int] = 7

    x: Value
    weight: Parameter
    bias: Parameter | None
    eps: float

    def infer_shape(self) -> tuple[Rows, int]:
        for parameter in self.parameters:
            require_parameter(parameter, self.x.cols)
        return self.x.rows, self.x.cols

    def evaluate(self, step: Evaluation) -> Array:
        x = step.values[self.x]
        centered = x - x.mean(axis=-1, keepdims=True)
        variance = np.mean(centered * centered, axis=-1, keepdims=True)
        normed: Array = centered / np.sqrt(variance + self.eps) * step.weights[self.weight]
        return normed if self.bias is None else normed + step.weights[self.bias]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x [rows, cols], weight [group] -> [rows, cols]; each group of columns is normalized on its own."""
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // weight.shape[0], weight.shape[0])
    mean_square = np.mean(groups * groups, axis=-1, keepdims=True)
    normed: Array = groups / np.sqrt(mean_square + eps) * weight
    return normed.reshape(x.shape)
