"""Low-rank products of adapters, added to products with weights: `y + scale * (x A^T) B^T` by rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from octavo.batch import Array, Float32
from octavo.errors import GraphError, ModelLoadError
from octavo.graph.domain_rows import domain_rows
from octavo.graph.ops.base import Evaluation, IndexNeed, Op, StepSizes, describe, require, require_parameter
from octavo.graph.ops.rowwise import ACTIVATIONS, require_activation, rms_norm
from octavo.graph.values import TOKENS, IndexArray, Parameter, Part, RowDomain, Value

ADAPTERS = RowDomain("adapters")
"""The adapters that an executor holds, by slot."""

ADAPTER_SLOTS = IndexArray(TOKENS, "adapters")
"""The slot of each token's adapter; -1: none."""

HEAD_PLACE = "lm_head.weight"
"""The place of the output head, also of one whose weight is the embedding."""


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """slots: adapters that an executor holds at once. rank: the highest of a part."""

    slots: int
    rank: int


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """scale * B A, beside a weight [out, in], or beside each of a stack of them."""

    a: Float32  # [rank, in], or [stack, rank, in]
    b: Float32  # [out, rank], or [stack, out, rank]
    scale: float

    @classmethod
    def checked(cls, a: Float32, b: Float32, scale: float, tensor: str) -> LowRank:
        """Raises ModelLoadError naming the tensor if the factors do not fit each other or are not finite."""
        fit = a.ndim in (2, 3) and b.ndim == a.ndim and a.shape[-2] == b.shape[-1] and a.shape[:-2] == b.shape[:-2]
        if not fit or not a.shape[-2]:
            raise ModelLoadError(f"tensor {tensor!r:.120}: the factors {list(a.shape)} and {list(b.shape)} do not fit")
        if not (np.isfinite(a).all() and np.isfinite(b).all() and np.isfinite(scale)):
            raise ModelLoadError(f"tensor {tensor!r:.120}: a factor or the scale, {scale}, is not finite")
        return cls(a, b, scale)

    @property
    def rank(self) -> int:
        return int(self.a.shape[-2])

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the weight."""
        return (*self.b.shape[:-1], int(self.a.shape[-1]))

    def scaled(self, factor: float) -> LowRank:
        """The same times a number."""
        return replace(self, scale=self.scale * factor)

    def beside(self, part: Part | None) -> LowRank:
        """The product beside a part of the weight: rows of B, columns of A, or some of a stack."""
        if part is None:
            return self
        index, axis = slice(part.begin, part.end), part.dimension - len(self.shape)
        if axis == -1:
            return replace(self, a=self.a[..., index])
        if axis == -2:
            return replace(self, b=self.b[..., index, :])
        return replace(self, a=self.a[index], b=self.b[index])


@dataclass(frozen=True, slots=True)
class AdapterSlots(Op):
    """The slot of each token's adapter as a column of numbers, -1 without one. -> [TOKENS, 1]"""

    index: IndexArray = ADAPTER_SLOTS

    def infer_shape(self) -> tuple[RowDomain, int]:
        return TOKENS, 1

    @property
    def row_needs(self) -> tuple[IndexNeed, ...]:
        return (IndexNeed(self.index, ADAPTERS, keeps=True),)

    def evaluate(self, step: Evaluation) -> Array:
        rows = domain_rows(step.batch, TOKENS)
        slots = rows.indices.get(self.index.name, np.full(rows.count, -1, np.int32))
        return slots.astype(step.dtype)[:, None]


@dataclass(frozen=True, slots=True)
class AddLowRank(Op):
    """y, plus the low-rank product of x with each row's adapter for each weight, whose columns lie side by side in y.

    norm: RMSNorm of x before the products. kind: of two weights, gate and up, the output is kind(gate) * up. A row's
    bits do not depend on the rows beside it.
    """

    row_wise: ClassVar[bool] = True

    y: Value  # [rows, columns of all weights]
    x: Value  # [rows, in]
    slots: Value  # [rows, 1]
    weights: tuple[Parameter, ...]  # beside which the products lie; they name them and are not read
    heads: int = 1  # 1, or those of the only weight, [heads, out, in]
    num_slots: int = 1
    max_rank: int = 1
    is_head: bool = False  # the product is that of the output head
    norm: Parameter | None = None
    eps: float = 0.0
    kind: str | None = None

    def infer_shape(self) -> tuple[RowDomain, int]:
        require(self.slots.cols == 1, f"slots {describe(self.slots)} are not one column")
        cols = sum(self.columns(weight) for weight in self.weights)
        fits = self.y.cols == cols and all(self.x.cols == self.heads * w.shape[-1] for w in self.weights)
        require(fits, f"y {describe(self.y)} and x {describe(self.x)} do not fit {[w.label for w in self.weights]}")
        require_parameter(self.norm, self.x.cols)
        if self.kind is None:
            return self.y.rows, cols
        require_activation(self.kind)
        require(len(self.weights) == 2 and self.weights[0].shape == self.weights[1].shape, "gate and up differ")
        return self.y.rows, cols // 2

    def columns(self, weight: Parameter) -> int:
        """Those of y that belong to a weight."""
        return self.heads * weight.shape[-2]

    def place(self, weight: Parameter) -> str:
        """The name by which an adapter has its part beside a weight."""
        return HEAD_PLACE if self.is_head else weight.name

    def weight_fraction(self, parameter: Parameter, sizes: StepSizes) -> float:  # noqa: ARG002
        return 1.0 if parameter == self.norm else 0.0

    def parts_of(self, parts: Mapping[str, LowRank]) -> Iterator[tuple[int, LowRank]]:
        """The numbers of the weights beside which an adapter has something, with what it has there.

        Raises GraphError if its rank is too high.
        """
        for number, weight in enumerate(self.weights):
            found = parts.get(self.place(weight))
            if found is not None:
                if found.rank > self.max_rank:
                    raise GraphError(f"{weight.label}: rank {found.rank} is above the limit of {self.max_rank}")
                yield number, found.beside(weight.part)

    def evaluate(self, step: Evaluation) -> Array:
        out: Array = step.values[self.y].copy()
        x, slots = step.values[self.x], step.values[self.slots][:, 0]
        x = x[: len(out)]  # logits are made of the first of the outputs
        if self.norm is not None:
            x = rms_norm(x, step.weights[self.norm], x.shape[-1], self.eps)
        begins = np.cumsum([0, *map(self.columns, self.weights)])
        for slot in np.unique(slots[slots >= 0]).astype(int):
            rows = np.flatnonzero(slots[: len(out)] == slot)
            for number, part in self.parts_of(step.adapters.get(slot, {})):
                out[rows, begins[number] : begins[number + 1]] += self._product(part, x[rows])
        if self.kind is None:
            return out
        half = out.shape[1] // 2
        activated: Array = ACTIVATIONS[self.kind](out[:, :half]) * out[:, half:]
        return activated

    def _product(self, part: LowRank, x: Array) -> Array:
        a, b = (np.asarray(each, x.dtype) for each in (part.a, part.b))
        if a.ndim == 2:
            product: Array = (x @ a.T) @ b.T * x.dtype.type(part.scale)
            return product
        heads, _, width = a.shape
        inner = np.einsum("nhi,hri->nhr", x.reshape(-1, heads, width), a)
        found: Array = np.einsum("nhr,hor->nho", inner, b * x.dtype.type(part.scale)).reshape(len(x), -1)
        return found

    @property
    def in_place(self) -> tuple[Value, ...]:
        return () if self.kind is not None or self.y == self.x else (self.y,)
