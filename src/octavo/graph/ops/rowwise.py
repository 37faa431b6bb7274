"""Operations on each row by itself: elementwise operations, including activation functions, and normalizations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from octavo.batch import Array
from octavo.graph.cuts import COLUMNWISE, Columnwise, Cut, GroupFactors
from octavo.graph.ops.base import Evaluation, Op, describe, require, require_parameter
from octavo.graph.ops.spanning_norm import NormGroups
from octavo.graph.values import Parameter, RowDomain, Value

_erf = np.frompyfunc(math.erf, 1, 1)


def sigmoid(x: Array) -> Array:
    # tanh cannot overflow, exp(-x) can.
    out: Array = 0.5 * (np.tanh(0.5 * x) + 1.0)
    return out


def gelu(x: Array) -> Array:
    """Compute x * Phi(x) exactly. Hendrycks and Gimpel, arXiv 1606.08415."""
    out: Array = 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0)).astype(x.dtype))
    return out


def gelu_tanh(x: Array) -> Array:
    """Compute the tanh approximation of `gelu`, from the same paper."""
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


def quick_gelu(x: Array) -> Array:
    """Compute x * sigmoid(1.702 x), the sigmoid approximation of `gelu`, from the same paper."""
    out: Array = x * sigmoid(1.702 * x)
    return out


def below_zero(x: Array) -> Array:
    """Compute the part of xIELU below zero, e^x - 1 - x; zero above it. Huang and Schlag, arXiv 2411.13010."""
    below = np.minimum(x, 0.0)
    out: Array = np.expm1(below) - below
    return out


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": lambda x: x * sigmoid(x),
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": lambda x: np.maximum(x, 0.0),
    "relu2": lambda x: np.square(np.maximum(x, 0.0)),
    "sigmoid": sigmoid,
    "tanh": np.tanh,
    "quick_gelu": quick_gelu,
    "below_zero": below_zero,
}


def softcap(x: Array, cap: float) -> Array:
    """Compute cap * tanh(x / cap): x, smoothly limited to (-cap, cap). Gemma 2, arXiv 2408.00118."""
    out: Array = cap * np.tanh(x / cap)
    return out


def require_activation(kind: str) -> None:
    """Raise GraphError unless `kind` is one of ACTIVATIONS."""
    require(kind in ACTIVATIONS, f"unknown activation {kind!r}; known are {', '.join(ACTIVATIONS)}")


@dataclass(frozen=True, slots=True)
class Elementwise(Op):
    """Base of the elementwise operations on one value, or on two of the same shape."""

    row_wise: ClassVar[bool] = True
    element_flops: ClassVar[int] = 1
    cut: ClassVar[Cut[Any]] = COLUMNWISE

    def infer_shape(self) -> tuple[RowDomain, int]:
        self.check_attributes()
        first, *others = self.inputs
        for other in others:
            fits = (first.rows, first.cols) == (other.rows, other.cols)
            require(fits, f"shapes differ: {describe(first)} and {describe(other)}")
        return first.rows, first.cols

    def check_attributes(self) -> None:
        """Raise GraphError for an invalid attribute."""

    @property
    def in_place(self) -> tuple[Value, ...]:
        return self.inputs


@dataclass(frozen=True, slots=True)
class Add(Elementwise):
    """a + b"""

    cut: ClassVar[Cut[Any]] = Columnwise(keeps_addends=True)

    a: Value
    b: Value

    def evaluate(self, step: Evaluation) -> Array:
        return step.values[self.a] + step.values[self.b]


@dataclass(frozen=True, slots=True)
class Mul(Elementwise):
    """a * b, element by element; if b is narrower, each of its numbers multiplies a group of neighbouring columns"""

    cut: ClassVar[Cut[Any]] = GroupFactors()

    a: Value
    b: Value

    def infer_shape(self) -> tuple[RowDomain, int]:
        fits = self.a.rows is self.b.rows and self.a.cols % self.b.cols == 0
        require(fits, f"b {describe(self.b)} does not have the rows of a {describe(self.a)} and a part of its columns")
        return self.a.rows, self.a.cols

    def evaluate(self, step: Evaluation) -> Array:
        a, b = step.values[self.a], step.values[self.b]
        groups = a.reshape(len(a), self.b.cols, self.a.cols // self.b.cols)
        out: Array = (groups * b[:, :, None]).reshape(a.shape)
        return out


@dataclass(frozen=True, slots=True)
class Scale(Elementwise):
    """x * factor"""

    x: Value
    factor: float

    def check_attributes(self) -> None:
        require(math.isfinite(self.factor), f"factor {self.factor} is not finite")

    def evaluate(self, step: Evaluation) -> Array:
        return step.values[self.x] * self.factor


@dataclass(frozen=True, slots=True)
class Activation(Elementwise):
    """kind(x)"""

    element_flops: ClassVar[int] = 4

    x: Value
    kind: str  # a name in ACTIVATIONS

    def check_attributes(self) -> None:
        require_activation(self.kind)

    def evaluate(self, step: Evaluation) -> Array:
        return ACTIVATIONS[self.kind](step.values[self.x])


@dataclass(frozen=True, slots=True)
class GatedActivation(Elementwise):
    """kind(gate) * up: SwiGLU and GeGLU (`silu_mul`, `gelu_mul` of the builder). Shazeer, arXiv 2002.05202."""

    element_flops: ClassVar[int] = 5

    gate: Value
    up: Value
    kind: str

    @property
    def is_gate(self) -> bool:
        return True

    def check_attributes(self) -> None:
        require_activation(self.kind)

    def evaluate(self, step: Evaluation) -> Array:
        return ACTIVATIONS[self.kind](step.values[self.gate]) * step.values[self.up]


@dataclass(frozen=True, slots=True)
class Softcap(Elementwise):
    """cap * tanh(x / cap)"""

    element_flops: ClassVar[int] = 3

    x: Value
    cap: float

    def check_attributes(self) -> None:
        require(self.cap > 0, f"cap {self.cap} is not positive")

    def evaluate(self, step: Evaluation) -> Array:
        return softcap(step.values[self.x], self.cap)


@dataclass(frozen=True, slots=True)
class Clip(Elementwise):
    """x, limited to [low, high]; a bound may be infinite"""

    x: Value
    low: float
    high: float

    def check_attributes(self) -> None:
        require(self.low < self.high, f"low {self.low} is not less than high {self.high}")

    def evaluate(self, step: Evaluation) -> Array:
        return np.clip(step.values[self.x], self.low, self.high)


@dataclass(frozen=True, slots=True)
class RMSNorm(Op):
    """x / rms(x) * weight over groups of `group` columns; 0 means groups of the weight's length, such as heads.

    Zhang and Sennrich, arXiv 1910.07467; eps is added to the mean square.
    """

    row_wise: ClassVar[bool] = True
    element_flops: ClassVar[int] = 4
    cut: ClassVar[Cut[Any]] = NormGroups(centers=False)

    x: Value
    weight: Parameter | None  # [group], or one for several groups; its columns divide x.cols
    eps: float
    group: int = 0

    @property
    def columns(self) -> int:
        """The number of columns that are normalized together."""
        return self.weight.shape[0] if self.weight is not None and not self.group else self.group

    def infer_shape(self) -> tuple[RowDomain, int]:
        weight = self.weight
        name = f"a group of {self.group}" if weight is None else f"{weight.name} {list(weight.shape)}"
        fits = weight is None or len(weight.shape) == 1
        width = self.group if weight is None else weight.shape[0]
        require(fits and width > 0 and self.x.cols % width == 0, f"x {describe(self.x)} is not a multiple of {name}")
        require(width % self.columns == 0, f"{name} has no groups of {self.columns} columns")
        return self.x.rows, self.x.cols

    def evaluate(self, step: Evaluation) -> Array:
        weight = None if self.weight is None else step.weights[self.weight]
        return rms_norm(step.values[self.x], weight, self.columns, self.eps)


@dataclass(frozen=True, slots=True)
class LayerNorm(Op):
    """(x - mean) / sqrt(variance + eps) * weight + bias, over all columns or each `group` of them, such as a head.

    Ba et al., arXiv 1607.06450.
    """

    row_wise: ClassVar[bool] = True
    element_flops: ClassVar[int] = 7
    cut: ClassVar[Cut[Any]] = NormGroups(centers=True)

    x: Value
    weight: Parameter
    bias: Parameter | None
    eps: float
    group: int = 0  # 0 means all columns; weight and bias cover all groups

    @property
    def columns(self) -> int:
        """The number of columns that are normalized together."""
        return self.group or self.x.cols

    def infer_shape(self) -> tuple[RowDomain, int]:
        for parameter in self.parameters:
            require_parameter(parameter, self.x.cols)
        is_whole = self.group >= 0 and self.x.cols % self.columns == 0
        require(is_whole, f"x {describe(self.x)} is not a multiple of a group of {self.group}")
        return self.x.rows, self.x.cols

    def evaluate(self, step: Evaluation) -> Array:
        x = step.values[self.x]
        groups = x.reshape(*x.shape[:-1], x.shape[-1] // self.columns, self.columns)
        centered = groups - groups.mean(axis=-1, keepdims=True)
        variance = np.mean(centered * centered, axis=-1, keepdims=True)
        normed: Array = (centered / np.sqrt(variance + self.eps)).reshape(x.shape) * step.weights[self.weight]
        return normed if self.bias is None else normed + step.weights[self.bias]


def rms_norm(x: Array, weight: Array | None, group: int, eps: float) -> Array:
    """Normalize each `group` of columns of x [rows, cols] by itself -> [rows, cols].

    weight: repeated over the columns, for one group or several; None means no weight.
    """
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // group, group)
    mean_square = np.mean(groups * groups, axis=-1, keepdims=True)
    normed: Array = (groups / np.sqrt(mean_square + eps)).reshape(x.shape)
    return normed if weight is None else np.asarray(normed * np.tile(weight, x.shape[-1] // len(weight)))
