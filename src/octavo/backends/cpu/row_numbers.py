"""The numbers that a graph's domains and index arrays have in its native program (csrc/kernel.h)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.graph.builder import Graph
from octavo.graph.domains import DomainNeeds, described, domain_needs
from octavo.graph.ops.base import IndexNeed
from octavo.graph.values import LOGITS, OUTPUTS, SELECTED, TOKENS, IndexArray, RowDomain


@dataclass(frozen=True, slots=True)
class RowNumbers:
    """The numbers assigned to a graph's domains and index arrays.

    domains, indices: the number of each domain and of each index array. The ones that every program has come first.
    further: needs of the remaining domains, in their order.
    arrays: the index arrays after SELECTED.
    described: the domains that a batch describes in `Batch.domains`.
    """

    needs: tuple[DomainNeeds, ...]
    domains: Mapping[RowDomain, int]
    indices: Mapping[IndexArray, int]
    further: tuple[DomainNeeds, ...]
    arrays: tuple[IndexNeed, ...]
    described: tuple[RowDomain, ...]
    token_components: int

    @classmethod
    def of(cls, graph: Graph) -> RowNumbers:
        """Number the domains and index arrays of a graph."""
        needs = domain_needs(graph)
        further = tuple(need for need in needs if need.domain not in (TOKENS, OUTPUTS))
        arrays = tuple(index for need in needs for index in need.indices if index.index != SELECTED)
        domains = {d: i for i, d in enumerate((TOKENS, OUTPUTS, LOGITS, *(need.domain for need in further)))}
        indices = {index: i for i, index in enumerate((SELECTED, *(array.index for array in arrays)))}
        components = next(need.components for need in needs if need.domain is TOKENS)
        return cls(needs, domains, indices, further, arrays, described(needs), components)

    @property
    def numbers(self) -> Mapping[IndexArray | RowDomain, int]:
        """The numbers of index arrays and domains, as they appear in records' operands."""
        return dict([*self.indices.items(), *self.domains.items()])
