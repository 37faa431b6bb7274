"""The changes that adapters make to embeddings and to products with weights, row by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from octavo.batch import Array, Float32
from octavo.errors import GraphError, ModelLoadError
from octavo.graph.domain_rows import domain_rows
from octavo.graph.ops.base import Evaluation, IndexNeed, Op, StepSizes, describe, require, require_parameter
from octavo.graph.ops.rowwise import ACTIVATIONS, require_activation, rms_norm, softcap
from octavo.graph.values import TOKENS, IndexArray, Parameter, Part, RowDomain, Value

ADAPTERS = RowDomain("adapters")
"""The adapters that an executor holds, by slot."""

ADAPTER_SLOTS = IndexArray(TOKENS, "adapters")
"""The slot of each token's adapter; -1 means none."""

HEAD_PLACE = "lm_head.weight"
"""The name of the output head, even if its weight is the embedding."""


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """slots: number of adapters that an executor holds at once.
    rank: maximum rank of a part.
    """

    slots: int
    rank: int


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """y = gain * (W x) + scale * B (A x), for a weight W [out, in], or for each weight of a stack.

    gain: factor per output feature, for example from the magnitudes of DoRA; None means 1.
    a: None means the identity: B then has the size of W. With a gain of zeros, B replaces W.
    """

    a: Float32 | None  # [rank, in], or [stack, rank, in]
    b: Float32  # [out, rank], or [stack, out, rank]
    scale: float
    gain: Float32 | None = None  # [out], or [stack, out]

    @classmethod
    def checked(cls, a: Float32, b: Float32, scale: float, tensor: str) -> LowRank:
        """Create a part.

        Raises ModelLoadError naming the tensor if the factors do not fit each other or are not finite.
        """
        fit = a.ndim in (2, 3) and b.ndim == a.ndim and a.shape[-2] == b.shape[-1] and a.shape[:-2] == b.shape[:-2]
        if not fit or not a.shape[-2]:
            raise ModelLoadError(f"tensor {tensor!r:.120}: the factors {list(a.shape)} and {list(b.shape)} do not fit")
        if not (np.isfinite(a).all() and np.isfinite(b).all() and np.isfinite(scale)):
            raise ModelLoadError(f"tensor {tensor!r:.120}: a factor or the scale, {scale}, is not finite")
        return cls(a, b, scale)

    @classmethod
    def whole(cls, weight: Float32) -> LowRank:
        """Create a part that replaces the model's weight by `weight` [out, in]."""
        return cls(None, weight, 1.0, np.zeros(weight.shape[0], np.float32))

    def with_magnitudes(self, magnitudes: Float32, tensor: str) -> LowRank:
        """Return this part with a gain from these magnitudes.

        Raises ModelLoadError naming the tensor if they do not fit.
        """
        if magnitudes.shape != self.b.shape[:-1] or not np.isfinite(magnitudes).all():
            wanted = list(self.b.shape[:-1])
            raise ModelLoadError(
                f"tensor {tensor!r:.120} is {list(magnitudes.shape)}; it must be {wanted}, of finite numbers"
            )
        return replace(self, gain=magnitudes)

    def transposed(self) -> LowRank:
        """Return the same change, applied to the transposed weight.

        Requires that the change replaces the whole weight, or has no gain.
        """
        if self.a is None:
            return LowRank.whole(self.b.T)
        return LowRank(self.b.T, self.a.T, self.scale)

    def equals(self, other: LowRank) -> bool:
        """True if both have the same numbers."""
        mine, its = ((each.a, each.b, each.gain, np.float32(each.scale)) for each in (self, other))
        return all(a is b or np.array_equal(a, b) for a, b in zip(mine, its, strict=True))

    def merged(self, weight: Float32) -> Float32:
        """Return the weight with the change applied."""
        change = (self.b if self.a is None else np.matmul(self.b, self.a)) * np.float32(self.scale)
        kept = weight if self.gain is None else weight * self.gain[..., None]
        merged: Float32 = (kept + change).astype(np.float32)
        return merged

    @property
    def rank(self) -> int:
        return int(self.b.shape[-1])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return (*self.b.shape[:-1], self.rank if self.a is None else int(self.a.shape[-1]))

    @property
    def size(self) -> int:
        """The number of elements in all factors."""
        return self.b.size + (0 if self.a is None else self.a.size) + (0 if self.gain is None else self.gain.size)

    def scaled(self, factor: float) -> LowRank:
        """Return this change with its effect on the weight multiplied by a factor."""
        gain = None if self.gain is None else (1 + np.float32(factor) * (self.gain - 1)).astype(np.float32)
        return replace(self, scale=self.scale * factor, gain=gain)

    def beside(self, part: Part | None) -> LowRank:
        """Return the change to a part of the weight: rows of B, columns of A, or some matrices of a stack."""
        if part is None:
            return self
        index, axis = slice(part.begin, part.end), part.dimension - len(self.shape)
        if axis == -1:
            if self.a is None:
                return replace(self, b=self.b[..., index])
            return replace(self, a=self.a[..., index])
        if axis == -2:
            return self.rows(index)
        a, gain = (None if each is None else each[index] for each in (self.a, self.gain))
        return replace(self, a=a, b=self.b[index], gain=gain)

    def of(self, number: int) -> LowRank:
        """Return the change to one matrix of a stack."""
        a, gain = (None if each is None else each[number] for each in (self.a, self.gain))
        return replace(self, a=a, b=self.b[number], gain=gain)

    def rows(self, index: NDArray[np.intp] | slice) -> LowRank:
        """Return the change to these rows of the weight, in this order."""
        gain = None if self.gain is None else self.gain[..., index]
        return replace(self, b=self.b[..., index, :], gain=gain)

    def product(self, x: Array) -> Array:
        """Return scale * B (A x) of rows x [rows, in]; for a stack, side by side."""
        a, b = (None if each is None else np.asarray(each, x.dtype) for each in (self.a, self.b))
        assert b is not None
        scale = x.dtype.type(self.scale)
        if b.ndim == 2:
            inner = x if a is None else x @ a.T
            product: Array = inner @ b.T * scale
            return product
        heads = len(b)
        inner = x.reshape(len(x), heads, -1)
        if a is not None:
            inner = np.einsum("nhi,hri->nhr", inner, a)
        found: Array = np.einsum("nhr,hor->nho", inner, b * scale).reshape(len(x), -1)
        return found


class BesideWeights:
    """Fields shared by operations that apply adapters to weights; each dataclass declares them again."""

    __slots__ = ()

    weights: tuple[Parameter, ...]
    heads: int  # 1, or the heads of the only weight, [heads, out, in]
    num_slots: int
    max_rank: int
    is_head: bool  # the product is the output head's

    def columns(self, weight: Parameter) -> int:
        """Return the number of columns of the product with a weight."""
        return self.heads * weight.shape[-2]

    def place(self, weight: Parameter) -> str:
        """Return the name under which an adapter stores its part for a weight."""
        return HEAD_PLACE if self.is_head else weight.name

    def part(self, weight: Parameter) -> Part | None:
        """Return which part of the whole weight, as adapters store it, the operation uses; None means all of it."""
        return weight.part

    def parts_of(self, parts: Mapping[str, LowRank]) -> Iterator[tuple[int, LowRank]]:
        """Yield the number of each weight that an adapter changes, with the adapter's part for it.

        Raises GraphError if its rank is too high.
        """
        for number, weight in enumerate(self.weights):
            found = parts.get(self.place(weight))
            if found is not None:
                if found.a is not None and found.rank > self.max_rank:
                    raise GraphError(f"{weight.label}: rank {found.rank} is above the limit of {self.max_rank}")
                yield number, found.beside(self.part(weight))

    def plain_product(self, step: Evaluation, x: Array, number: int) -> Array:
        """Return W x for one weight, or for each head."""
        weight = self.weights[number]
        if self.heads == 1:
            return step.product(x, weight)
        stack = step.weights[weight]
        found: Array = np.einsum("nhi,hoi->nho", x.reshape(len(x), self.heads, -1), stack).reshape(len(x), -1)
        return found

    def add_parts(self, step: Evaluation, number: int, x: Array, slots: Array, y: Array) -> None:
        """Add the changes of the rows' adapters to y, which contains W x of a weight."""
        for slot in np.unique(slots[slots >= 0]).astype(int):
            part = dict(self.parts_of(step.adapters.get(slot, {}))).get(number)
            if part is None:
                continue
            rows = np.flatnonzero(slots == slot)
            if part.gain is not None:
                plain = self.plain_product(step, x[rows], number)
                y[rows] += (part.gain.reshape(-1) - 1).astype(y.dtype) * plain
            y[rows] += part.product(x[rows])


@dataclass(frozen=True, slots=True)
class AdapterSlots(Op):
    """The slot of each token's adapter as a column of numbers, -1 for none. -> [TOKENS, 1]"""

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
class AddLowRank(BesideWeights, Op):
    """y, which is W x of each weight side by side, changed by each row's adapter.

    norm: RMSNorm of x before the products.
    scale, softcap: applied to the output, as in `Logits`.
    kind: with two weights, gate and up, the output is kind(gate) * up.
    y may include biases and a residual. A row's bits do not depend on the other rows.
    """

    row_wise: ClassVar[bool] = True

    y: Value  # [rows, columns of all weights]
    x: Value  # [rows, in]
    slots: Value  # [rows, 1]
    weights: tuple[Parameter, ...]
    heads: int = 1
    num_slots: int = 1
    max_rank: int = 1
    is_head: bool = False
    norm: Parameter | None = None
    eps: float = 0.0
    kind: str | None = None
    scale: float = 1.0
    softcap: float | None = None

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

    def weight_fraction(self, parameter: Parameter, sizes: StepSizes) -> float:  # noqa: ARG002
        return 1.0 if parameter == self.norm else 0.0

    def evaluate(self, step: Evaluation) -> Array:
        out: Array = step.values[self.y].copy()
        x, slots = (step.values[each][: len(out)] for each in (self.x, self.slots))  # logits are of the first outputs
        if self.norm is not None:
            x = rms_norm(x, step.weights[self.norm], x.shape[-1], self.eps)
        begins = np.cumsum([0, *map(self.columns, self.weights)])
        for number in range(len(self.weights)):
            self.add_parts(step, number, x, slots[:, 0], out[:, begins[number] : begins[number + 1]])
        if self.kind is not None:
            half = out.shape[1] // 2
            out = ACTIVATIONS[self.kind](out[:, :half]) * out[:, half:]
        out = out * self.scale
        return out if self.softcap is None else softcap(out, self.softcap)

    @property
    def in_place(self) -> tuple[Value, ...]:
        return () if self.kind is not None or self.y == self.x else (self.y,)


@dataclass(frozen=True, slots=True)
class AddToEmbedding(BesideWeights, Op):
    """y, the rows of an `Embedding`, changed by each token's adapter. Parts apply to the transposed table.

    has_all, first, total: as in the `Embedding`. -> [TOKENS, cols]
    """

    row_wise: ClassVar[bool] = False

    y: Value  # [TOKENS, cols]
    slots: Value  # [TOKENS, 1]
    weights: tuple[Parameter, ...]  # the table
    has_all: bool = True
    first: int = 0
    total: int = 0
    num_slots: int = 1
    max_rank: int = 1

    def infer_shape(self) -> tuple[RowDomain, int]:
        require(len(self.weights) == 1 and self.weights[0].shape[-1] == self.y.cols, "y is not of the table")
        require(self.slots.cols == 1 and self.y.rows is TOKENS, f"y {describe(self.y)} is not of tokens")
        return TOKENS, self.y.cols

    def weight_fraction(self, parameter: Parameter, sizes: StepSizes) -> float:  # noqa: ARG002
        return 0.0

    def place(self, weight: Parameter) -> str:
        """See `BesideWeights`."""
        return weight.name

    def part(self, weight: Parameter) -> Part | None:
        """Return which part of the transposed table the operation uses; None means all of it."""
        return None if weight.part is None else replace(weight.part, dimension=1 - weight.part.dimension)

    def evaluate(self, step: Evaluation) -> Array:
        out: Array = step.values[self.y].copy()
        slots, ids = step.values[self.slots][:, 0], step.batch.token_ids
        rows_of_table = self.weights[0].shape[0]
        if not self.has_all:
            ids = np.where(ids < (self.total or rows_of_table), ids, 0)
        ids = ids - self.first
        is_here = (ids >= 0) & (ids < rows_of_table)
        for slot in np.unique(slots[slots >= 0]).astype(int):
            for _, part in self.parts_of(step.adapters.get(slot, {})):
                rows = np.flatnonzero((slots == slot) & is_here)
                if part.gain is not None:
                    out[rows] *= part.gain.astype(out.dtype)
                change = part.b[:, ids[rows]].T if part.a is None else part.a[:, ids[rows]].T @ part.b.T
                out[rows] += change.astype(out.dtype) * out.dtype.type(part.scale)
        return out

    @property
    def in_place(self) -> tuple[Value, ...]:
        return (self.y,)
