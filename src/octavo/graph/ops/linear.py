"""Operations with weight matrices: embeddings, linear layers and the output head; also a graph's inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from octavo.batch import Array
from octavo.graph.cuts import Cut
from octavo.graph.ops.base import Evaluation, Op, StepSizes, describe, require, require_parameter
from octavo.graph.ops.rowwise import ACTIVATIONS, require_activation, rms_norm, softcap
from octavo.graph.product_cuts import Contracts, OutputRows, TableRows
from octavo.graph.values import LOGITS, OUTPUTS, TOKENS, Parameter, RowDomain, Value


@dataclass(frozen=True, slots=True)
class Input(Op):
    """`Batch.inputs[slot]`: an output of another graph."""

    slot: int
    rows: RowDomain
    cols: int

    def infer_shape(self) -> tuple[RowDomain, int]:
        return self.rows, self.cols

    def evaluate(self, step: Evaluation) -> Array:
        return step.batch.inputs[self.slot].astype(step.dtype)


@dataclass(frozen=True, slots=True)
class Embedding(Op):
    """The row of the table for each id in `Batch.token_ids`.

    The weight may be a part of the table that begins at row `first`. It then gives zeros for the ids of other parts, so
    that the sum over all parts is the same as for the whole table.
    """

    cut: ClassVar[Cut[Any]] = TableRows()

    weight: Parameter  # [vocab, cols]; -> [TOKENS, cols]
    has_all: bool = True  # False means ids beyond the table take its row 0
    first: int = 0
    total: int = 0  # rows of the whole table; 0 if the weight is the whole

    @property
    def num_rows(self) -> int:
        """The number of rows of the whole table."""
        return self.total or self.weight.shape[0]

    def infer_shape(self) -> tuple[RowDomain, int]:
        require(len(self.weight.shape) == 2, f"{self.weight.name} {list(self.weight.shape)} is not a matrix")
        fits = 0 <= self.first <= self.num_rows - self.weight.shape[0]
        require(fits, f"rows from {self.first} on of {self.num_rows} are not {self.weight.label}")
        return TOKENS, self.weight.shape[1]

    def weight_fraction(self, parameter: Parameter, sizes: StepSizes) -> float:
        return min(1.0, sizes.tokens / parameter.shape[0])

    def evaluate(self, step: Evaluation) -> Array:
        ids = step.batch.token_ids
        if not self.has_all:
            ids = np.where(ids < self.num_rows, ids, 0)
        rows, table = ids - self.first, step.weights[self.weight]
        if not self.total:
            return table[rows]
        is_here = (rows >= 0) & (rows < len(table))
        return np.where(is_here[:, None], table[np.where(is_here, rows, 0)], table.dtype.type(0))


@dataclass(frozen=True, slots=True)
class PositionEmbedding(Op):
    """The row of a learned table for each of `Batch.positions`. The first `offset` rows belong to no position."""

    weight: Parameter  # [offset + positions, cols]; -> [TOKENS, cols]
    offset: int = 0

    @property
    def num_positions(self) -> int:
        """The number of positions in the table."""
        return self.weight.shape[0] - self.offset

    def infer_shape(self) -> tuple[RowDomain, int]:
        require(len(self.weight.shape) == 2, f"{self.weight.name} {list(self.weight.shape)} is not a matrix")
        require(0 <= self.offset < self.weight.shape[0], f"offset {self.offset} of {self.weight.shape[0]} rows")
        return TOKENS, self.weight.shape[1]

    def weight_fraction(self, parameter: Parameter, sizes: StepSizes) -> float:
        return min(1.0, sizes.tokens / parameter.shape[0])

    def evaluate(self, step: Evaluation) -> Array:
        return step.weights[self.weight][step.batch.positions + self.offset]


@dataclass(frozen=True, slots=True)
class Linear(Op):
    """x @ weight.T + bias"""

    row_wise: ClassVar[bool] = True
    cut: ClassVar[Cut[Any]] = Contracts()

    x: Value
    weight: Parameter  # [out, in]
    bias: Parameter | None = None  # [out]

    def infer_shape(self) -> tuple[RowDomain, int]:
        return self.x.rows, require_linear(self.x, self.weight, self.bias)

    def flops(self, sizes: StepSizes) -> int:
        return linear_flops(sizes.rows(self.x.rows), self.weight, self.bias)

    @property
    def products(self) -> tuple[Parameter, ...]:
        return (self.weight,)

    def multiplied_with(self, value: Value) -> tuple[Parameter, ...]:  # noqa: ARG002
        return (self.weight,)

    def evaluate(self, step: Evaluation) -> Array:
        return linear(step, step.values[self.x], self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Logits(Op):
    """The output head: a linear layer on the first selected rows, followed by an optional soft cap. -> [LOGITS, vocab]

    `scale` multiplies the logits before the cap.
    """

    cut: ClassVar[Cut[Any]] = OutputRows()

    x: Value
    weight: Parameter  # [vocab, in]
    bias: Parameter | None = None
    softcap: float | None = None
    scale: float = 1.0

    def infer_shape(self) -> tuple[RowDomain, int]:
        require(self.x.rows is OUTPUTS, f"x {describe(self.x)} must have selected rows: use select_rows first")
        require(self.softcap is None or self.softcap > 0, f"softcap {self.softcap} is not positive")
        return LOGITS, require_linear(self.x, self.weight, self.bias)

    def flops(self, sizes: StepSizes) -> int:
        elementwise = (self.scale != 1.0) + 3 * (self.softcap is not None)
        product = linear_flops(sizes.outputs, self.weight, self.bias)
        return product + elementwise * sizes.outputs * self.weight.shape[0]

    def evaluate(self, step: Evaluation) -> Array:
        x = step.values[self.x][: len(step.batch.logits_indices)]
        logits = linear(step, x, self.weight, self.bias) * self.scale
        return logits if self.softcap is None else softcap(logits, self.softcap)


@dataclass(frozen=True, slots=True)
class FusedLinear(Op):
    """Norm -> several linears side by side (or gate and up with an activation) -> + residual. Made by passes.

    Without `kind`, the columns are the outputs of all weights side by side. With `kind` there are two weights, gate and
    up, and the output is kind(gate) * up.
    """

    row_wise: ClassVar[bool] = True

    x: Value
    residual: Value | None
    weights: tuple[Parameter, ...]
    biases: tuple[Parameter | None, ...]  # one per weight
    norm: Parameter | None = None  # RMSNorm of x before the product
    eps: float = 0.0
    kind: str | None = None

    def infer_shape(self) -> tuple[RowDomain, int]:
        require(len(self.weights) == len(self.biases) > 0, f"{len(self.weights)} weights, {len(self.biases)} biases")
        sizes = [require_linear(self.x, w, b) for w, b in zip(self.weights, self.biases, strict=True)]
        require_parameter(self.norm, self.x.cols)
        cols = sum(sizes)
        if self.kind is not None:
            require_activation(self.kind)
            require(len(sizes) == 2 and sizes[0] == sizes[1], f"gate and up have {sizes} features")
            cols = sizes[0]
        if self.residual is not None:
            require(
                (self.residual.rows, self.residual.cols) == (self.x.rows, cols),
                f"residual {describe(self.residual)} is not [{self.x.rows.name}, {cols}]",
            )
        return self.x.rows, cols

    def flops(self, sizes: StepSizes) -> int:
        rows = sizes.rows(self.x.rows)
        products = sum(linear_flops(rows, w, b) for w, b in zip(self.weights, self.biases, strict=True))
        norm = 4 * rows * self.x.cols if self.norm is not None else 0
        activation = 5 * rows * self.weights[0].shape[0] if self.kind is not None else 0
        residual = rows * self.residual.cols if self.residual is not None else 0
        return products + norm + activation + residual

    @property
    def is_gate(self) -> bool:
        return self.kind is not None and self.residual is None

    def multiplied_with(self, value: Value) -> tuple[Parameter, ...]:
        return self.weights if self.norm is None and self.residual != value else ()

    def evaluate(self, step: Evaluation) -> Array:
        x = step.values[self.x]
        if self.norm is not None:
            x = rms_norm(x, step.weights[self.norm], x.shape[-1], self.eps)
        parts = [linear(step, x, w, b) for w, b in zip(self.weights, self.biases, strict=True)]
        out = ACTIVATIONS[self.kind](parts[0]) * parts[1] if self.kind is not None else np.concatenate(parts, axis=-1)
        return out if self.residual is None else out + step.values[self.residual]

    @property
    def in_place(self) -> tuple[Value, ...]:
        # Every row of the product needs all of x, so x itself can never be overwritten.
        return () if self.residual is None or self.residual == self.x else (self.residual,)


def require_linear(x: Value, weight: Parameter, bias: Parameter | None) -> int:
    """Return the number of output features. Raises GraphError if x, weight [out, in] and bias [out] do not fit."""
    require(
        len(weight.shape) == 2 and weight.shape[1] == x.cols,
        f"x {describe(x)} does not fit {weight.name} {list(weight.shape)}",
    )
    require_parameter(bias, weight.shape[0])
    return weight.shape[0]


def linear_flops(rows: int, weight: Parameter, bias: Parameter | None) -> int:
    out_features, in_features = weight.shape
    return rows * out_features * (2 * in_features + (bias is not None))


def linear(step: Evaluation, x: Array, weight: Parameter, bias: Parameter | None) -> Array:
    """Multiply x [rows, in] -> [rows, out]."""
    product = step.product(x, weight)
    return product if bias is None else product + step.weights[bias]
