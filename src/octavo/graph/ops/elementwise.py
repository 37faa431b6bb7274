"""Operations on single elements, and the activation functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from octavo.batch import Array
from octavo.graph.ops.base import Evaluation, Op, StepSizes, describe, require
from octavo.graph.values import Rows, Value

_erf = np.frompyfunc(math.erf, 1, 1)


def sigmoid(x: Array) -> Array:
    # tanh cannot overflow, exp(-x) can.
    out: Array = 0.5 * (np.tanh(0.5 * x) + 1.0)
    return out


def gelu(x: Array) -> Array:
    """x * Phi(x), exact. Hendrycks and Gimpel, arXiv 1606.08415."""
    out: Array = 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0)).astype(x.dtype))
    return out


def gelu_tanh(x: Array) -> Array:
    """The tanh approximation of `gelu`, from the same paper."""
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": lambda x: x * sigmoid(x),
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": lambda x: np.maximum(x, 0.0),
    "relu2": lambda x: np.square(np.maximum(x, 0.0)),
    "sigmoid": sigmoid,
    "tanh": np.tanh,
}


def softcap(x: Array, cap: float) -> Array:
    """cap * tanh(x / cap): x, smoothly limited to (-cap, cap). Gemma 2, arXiv 2408.00118."""
    out: Array = cap * np.tanh(x / cap)
    return out


def require_activation(kind: str) -> None:
    """Raises GraphError unless `kind` is one of ACTIVATIONS."""
    require(kind in ACTIVATIONS, f"unknown activation {kind!r}; known are {', '.join(ACTIVATIONS)}")


def require_same_shape(a: Value, b: Value) -> None:
    """Raises GraphError unless both have the same rows and columns."""
    require((a.rows, a.cols) == (b.rows, b.cols), f"shapes differ: {describe(a)} and {describe(b)}")


@dataclass(frozen=True, slots=True)
class Add(Op):
    """a + b"""

    row_wise: ClassVar[bool] = True

    a: Value
    b: Value

    def infer_shape(self) -> tuple[Rows, int]:
        require_same_shape(self.a, self.b)
        return self.a.rows, self.a.cols

    def flops(self, sizes: StepSizes) -> int:
        return sizes.rows(self.a.rows) * self.a.cols

    def evaluate(self, step: Evaluation) -> Array:
        return step.value(self.a) + step.value(self.b)

    @property
    def in_place(self) -> tuple[Value, ...]:
        return self.a, self.b


@dataclass(frozen=True, slots=True)
class Mul(Op):
    """a * b, element by element"""

    row_wise: ClassVar[bool] = True

    a: Value
    b: Value

    def infer_shape(self) -> tuple[Rows, int]:
        require_same_shape(self.a, self.b)
        return self.a.rows, self.a.cols

    def flops(self, sizes: StepSizes) -> int:
        return sizes.rows(self.a.rows) * self.a.cols

    def evaluate(self, step: Evaluation) -> Array:
        return step.value(self.a) * step.value(self.b)

    @property
    def in_place(self) -> tuple[Value, ...]:
        return self.a, self.b


@dataclass(frozen=True, slots=True)
class Scale(Op):
    """x * factor"""

    row_wise: ClassVar[bool] = True

    x: Value
    factor: float

    def infer_shape(self) -> tuple[Rows, int]:
        require(math.isfinite(self.factor), f"factor {self.factor} is not finite")
        return self.x.rows, self.x.cols

    def flops(self, sizes: StepSizes) -> int:
        return sizes.rows(self.x.rows) * self.x.cols

    def evaluate(self, step: Evaluation) -> Array:
        return step.value(self.x) * self.factor

    @property
    def in_place(self) -> tuple[Value, ...]:
        return (self.x,)


@dataclass(frozen=True, slots=True)
class Activation(Op):
    """kind(x)"""

    row_wise: ClassVar[bool] = True

    x: Value
    kind: str  # silu, gelu, gelu_tanh, relu, relu2, sigmoid, tanh

    def infer_shape(self) -> tuple[Rows, int]:
        require_activation(self.kind)
        return self.x.rows, self.x.cols

    def flops(self, sizes: StepSizes) -> int:
        return 4 * sizes.rows(self.x.rows) * self.x.cols

    def evaluate(self, step: Evaluation) -> Array:
        return ACTIVATIONS[self.kind](step.value(self.x))

    @property
    def in_place(self) -> tuple[Value, ...]:
        return (self.x,)


@dataclass(frozen=True, slots=True)
class GatedActivation(Op):
    """kind(gate) * up: SwiGLU and GeGLU (`silu_mul`, `gelu_mul` of the builder). Shazeer, arXiv 2002.05202."""

    row_wise: ClassVar[bool] = True

    gate: Value
    up: Value
    kind: str

    def infer_shape(self) -> tuple[Rows, int]:
        require_activation(self.kind)
        require_same_shape(self.gate, self.up)
        return self.gate.rows, self.gate.cols

    def flops(self, sizes: StepSizes) -> int:
        return 5 * sizes.rows(self.gate.rows) * self.gate.cols

    def evaluate(self, step: Evaluation) -> Array:
        return ACTIVATIONS[self.kind](step.value(self.gate)) * step.value(self.up)

    @property
    def in_place(self) -> tuple[Value, ...]:
        return self.gate, self.up


@dataclass(frozen=True, slots=True)
class Softcap(Op):
    """cap * tanh(x / cap)"""

    row_wise: ClassVar[bool] = True

    x: Value
    cap: float

    def infer_shape(self) -> tuple[Rows, int]:
        require(self.cap > 0, f"cap {self.cap} is not positive")
        return self.x.rows, self.x.cols

    def flops(self, sizes: StepSizes) -> int:
        return 3 * sizes.rows(self.x.rows) * self.x.cols

    def evaluate(self, step: Evaluation) -> Array:
        return softcap(step.value(self.x), self.cap)

    @property
    def in_place(self) -> tuple[Value, ...]:
        return (self.x,)
