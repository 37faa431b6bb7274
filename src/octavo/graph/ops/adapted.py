"""A product with weights and adapters in one operation, as native kernels compute it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from octavo.batch import Array
from octavo.graph.ops.base import Evaluation, Op, StepSizes, describe, require, require_parameter
from octavo.graph.ops.linear import linear_flops
from octavo.graph.ops.low_rank import BesideWeights
from octavo.graph.ops.rowwise import ACTIVATIONS, require_activation, rms_norm, softcap
from octavo.graph.values import LOGITS, OUTPUTS, Parameter, RowDomain, Value


@dataclass(frozen=True, slots=True)
class AdaptedLinear(BesideWeights, Op):
    """A product and its `AddLowRank` as one operation, made by a pass. The products of the weights stay separate.

    For each weight W, with x or its norm as input, the operation computes gain * (W x) + scale * B A x + bias, where A
    and B belong to the adapter of the row. The results are placed side by side or combined as kind(gate) * up. Then
    scale, soft cap and residual are applied. A row's bits do not depend on the other rows.
    """

    row_wise: ClassVar[bool] = True

    x: Value  # [rows, heads * in]
    slots: Value  # [rows, 1]
    residual: Value | None
    weights: tuple[Parameter, ...]
    biases: tuple[Parameter | None, ...]  # one per weight
    norm: Parameter | None = None
    eps: float = 0.0
    kind: str | None = None
    softcap: float | None = None
    scale: float = 1.0
    heads: int = 1
    num_slots: int = 1
    max_rank: int = 1
    is_head: bool = False

    def infer_shape(self) -> tuple[RowDomain, int]:
        require(self.slots.cols == 1, f"slots {describe(self.slots)} are not one column")
        require(len(self.weights) == len(self.biases) > 0, f"{len(self.weights)} weights, {len(self.biases)} biases")
        for weight, bias in zip(self.weights, self.biases, strict=True):
            fits = self.x.cols == self.heads * weight.shape[-1]
            require(fits, f"x {describe(self.x)} does not fit {weight.label} {list(weight.shape)}")
            require_parameter(bias, self.columns(weight))
        require_parameter(self.norm, self.x.cols)
        require(not self.is_head or self.x.rows is OUTPUTS, f"x {describe(self.x)} must have selected rows")
        cols = sum(map(self.columns, self.weights))
        if self.kind is not None:
            require_activation(self.kind)
            require(len(self.weights) == 2 and self.weights[0].shape == self.weights[1].shape, "gate and up differ")
            cols //= 2
        rows = LOGITS if self.is_head else self.x.rows
        fits = self.residual is None or (self.residual.rows, self.residual.cols) == (rows, cols)
        require(fits, f"a residual is not [{rows.name}, {cols}]")
        return rows, cols

    def flops(self, sizes: StepSizes) -> int:
        rows = sizes.rows(LOGITS if self.is_head else self.x.rows)
        matrices = (Parameter(w.name, (self.columns(w), w.shape[-1])) for w in self.weights)
        products = sum(linear_flops(rows, w, b) for w, b in zip(matrices, self.biases, strict=True))
        return products + (4 * rows * self.x.cols if self.norm is not None else 0)

    def evaluate(self, step: Evaluation) -> Array:
        x, slots = step.values[self.x], step.values[self.slots][:, 0]
        if self.is_head:
            x, slots = (each[: len(step.batch.logits_indices)] for each in (x, slots))
        if self.norm is not None:
            x = rms_norm(x, step.weights[self.norm], x.shape[-1], self.eps)
        columns = []
        for number, bias in enumerate(self.biases):
            y = self.plain_product(step, x, number)
            self.add_parts(step, number, x, slots, y)
            columns.append(y if bias is None else y + step.weights[bias])
        out = ACTIVATIONS[self.kind](columns[0]) * columns[1] if self.kind is not None else np.concatenate(columns, -1)
        out = out * self.scale
        out = out if self.softcap is None else softcap(out, self.softcap)
        return out if self.residual is None else out + step.values[self.residual]

    @property
    def in_place(self) -> tuple[Value, ...]:
        return () if self.residual is None or self.residual == self.x else (self.residual,)
