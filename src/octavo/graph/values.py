"""Symbolic values, their row counts, and named parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.graph.builder import Graph


@dataclass(frozen=True, slots=True, eq=False)
class RowDomain:
    """The symbolic number of rows of a value, which becomes a number in each step (`octavo.batch.domain_rows`).

    name: unique within a graph.
    A model may declare further domains in addition to the three below. It must create each of them only once, because
    domains are compared by identity.
    """

    name: str

    def __repr__(self) -> str:
        return self.name


TOKENS = RowDomain("tokens")
"""Every scheduled token of the step."""

OUTPUTS = RowDomain("outputs")
"""The rows that a step is asked for: first those of `Batch.logits_indices`, then those of `Batch.hidden_indices`."""

LOGITS = RowDomain("logits")
"""The first rows of OUTPUTS, given by `Batch.logits_indices`. A backend may hold only some of them at once
(`ExecutorLimits.max_logits_rows`)."""


@dataclass(frozen=True, slots=True)
class IndexArray:
    """An array of a step with one or more row numbers in another domain for each row of `rows`.

    name: unique within the domain (`octavo.batch.DomainRows.indices`).
    """

    rows: RowDomain
    name: str


SELECTED = IndexArray(OUTPUTS, "tokens")
"""The token of each output row: `Batch.output_indices`."""


@dataclass(frozen=True, slots=True)
class Value:
    """A matrix [rows, cols] that an operation produces. Heads are folded into the columns."""

    id: int
    rows: RowDomain
    cols: int
    graph: Graph | None = field(default=None, compare=False, repr=False)  # the builder, for the operators

    def __hash__(self) -> int:
        return self.id

    def __add__(self, other: Value) -> Value:
        return self._builder().plus(self, other)

    def __mul__(self, other: Value | float) -> Value:
        return self._builder().times(self, other)

    __rmul__ = __mul__

    def _builder(self) -> Graph:
        assert self.graph is not None, "this value was not made by a graph builder"
        return self.graph


@dataclass(frozen=True, slots=True)
class Part:
    """The indices [begin, end) of one dimension of a weight: rows, columns (the last), or the matrices of a stack.

    more: further ranges, for vectors only. They are needed because the heads of a rank need not be adjacent.
    """

    dimension: int
    begin: int
    end: int
    more: tuple[tuple[int, int], ...] = ()

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """All ranges, in order."""
        return (self.begin, self.end), *self.more

    @property
    def count(self) -> int:
        """The number of indices."""
        return sum(end - begin for begin, end in self.ranges)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A weight by its checkpoint name, for example `layers.0.self_attn.q_proj.weight`, or a part of it.

    shape: shape of the weight or its part, [out_features, in_features] for a linear layer.
    plain: a table of vectors, such as the biases of experts: float32, never packed for products.
    """

    name: str
    shape: tuple[int, ...]
    part: Part | None = None
    plain: bool = False

    @property
    def is_matrix(self) -> bool:
        """True if a backend may pack it for products; otherwise its numbers are read unchanged, in float32."""
        return len(self.shape) > 1 and not self.plain

    @property
    def label(self) -> str:
        """The name, including the part if it is one: `layers.0.mlp.up_proj.weight[0: 0 to 512]`."""
        if self.part is None:
            return self.name
        ranges = ", ".join(f"{begin} to {end}" for begin, end in self.part.ranges)
        return f"{self.name}[{self.part.dimension}: {ranges}]"
