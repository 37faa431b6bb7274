"""The arrays that a graph reads about the rows of its domains, and the checks of a batch that contains them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from octavo.batch import Batch, DomainRows, Int32
from octavo.errors import GraphError, UsageError
from octavo.graph.domain_rows import domain_rows
from octavo.graph.ops.base import IndexNeed, Op
from octavo.graph.values import LOGITS, OUTPUTS, SELECTED, TOKENS, RowDomain

if TYPE_CHECKING:
    from octavo.graph.builder import Graph

_NAMES = {
    (TOKENS, "starts"): "query_start_loc",
    (OUTPUTS, SELECTED.name): "logits_indices and hidden_indices",
}  # names of fields of `Batch`


@dataclass(frozen=True, slots=True)
class DomainNeeds:
    """The arrays that a graph reads about the rows of a domain: see `RowNeed`.

    groups: numbers of the domain's cache groups.
    """

    domain: RowDomain
    components: int = 0
    starts: bool = False
    indices: tuple[IndexNeed, ...] = ()
    groups: tuple[int, ...] = ()

    def name(self, array: str) -> str:
        """Return a human-readable name of an array, such as `patches.starts`."""
        return _NAMES.get((self.domain, array), f"{self.domain.name}.{array}")


def domain_needs(graph: Graph) -> tuple[DomainNeeds, ...]:
    """Return the needs of a graph, both for TOKENS and OUTPUTS, which are part of every batch, and for its further
    domains.

    Raises GraphError if two domains have the same name, or if two operations read an index in different ways.
    """
    found = {
        TOKENS: DomainNeeds(TOKENS, 1, True),
        OUTPUTS: DomainNeeds(OUTPUTS, indices=(IndexNeed(SELECTED, TOKENS),)),
    }
    for node in graph.nodes:
        for domain in (node.output.rows, *(value.rows for value in node.op.inputs)):
            if domain is not LOGITS:
                found.setdefault(domain, DomainNeeds(domain))
        _add_needs(graph, found, node.op)
    names = [domain.name for domain in (*found, LOGITS)]
    if twice := {name for name in names if names.count(name) > 1}:
        raise GraphError(f"several domains of rows have the name {', '.join(sorted(twice))}; declare each domain once")
    return tuple(found.values())


def _add_needs(graph: Graph, found: dict[RowDomain, DomainNeeds], op: Op) -> None:
    for need in op.row_needs:
        if not isinstance(need, IndexNeed):
            known = found.setdefault(need.domain, DomainNeeds(need.domain))
            components, starts = max(known.components, need.components), known.starts or need.starts
            layout = enumerate(graph.cache_layout.groups) if need.cached else ()
            groups = tuple(number for number, group in layout if group.domain is need.domain) or known.groups
            found[need.domain] = replace(known, components=components, starts=starts, groups=groups)
            continue
        known = found.setdefault(need.index.rows, DomainNeeds(need.index.rows))
        same = [each for each in known.indices if each.index == need.index]
        if same and same[0] != need:
            raise GraphError(f"{op.name}: another operation reads {known.name(need.index.name)} differently")
        if not same:
            found[need.index.rows] = replace(known, indices=(*known.indices, need))
        found.setdefault(need.source, DomainNeeds(need.source))


def check_limits(graph: Graph, limits: Mapping[RowDomain, int]) -> None:
    """Raise UsageError for a domain without a limit on its number of rows."""
    for need in domain_needs(graph):
        if need.domain not in limits:
            raise UsageError(
                f"the graph has rows of {need.domain.name}; an executor must know their maximum number: "
                "set it in ExecutorLimits.further_rows"
            )


def check_domains(
    needs: Iterable[DomainNeeds], limits: Mapping[RowDomain, int], batch: Batch, cache: tuple[int, int] = (0, 0)
) -> None:
    """Raise UsageError for too many rows in a domain, and ValueError for an array that is missing or wrong.

    cache: number of blocks and tokens per block, for graphs that cache rows of further domains.
    """
    if batch.domains:
        check_names([domain.name for domain in limits], batch)
    for need in needs:
        rows = domain_rows(batch, need.domain)
        if rows.count > limits[need.domain]:
            raise UsageError(
                f"a step with {rows.count} {need.domain.name} exceeds the executor's limit of {limits[need.domain]}"
            )
        if need.starts:
            _check_starts(need.name("starts"), rows)
        if need.components and rows.count:
            shape = () if rows.positions is None else rows.positions.shape
            least = 1 if need.domain is TOKENS and len(shape) == 2 and shape[0] == 1 else need.components
            if len(shape) != 2 or shape[0] < least or shape[1] != rows.count:
                raise ValueError(f"{need.name('positions')} are {list(shape)}, not [{need.components}, {rows.count}]")
        for index in need.indices:
            _check_index(need.name(index.index.name), index, rows, domain_rows(batch, index.source).count)
        if need.groups:
            _check_cached(need, rows, batch, *cache)


def check_names(known: Collection[str], batch: Batch) -> None:
    """Raise UsageError if the batch has rows of an unknown domain.

    known: names of the domains in the executor's limits. They may include more than this graph's domains, because each
    part of a model gets the batch of the whole model.
    """
    if batch.domains and (unknown := sorted(set(batch.domains).difference(known))):
        raise UsageError(f"the step has rows of {', '.join(unknown)}; the graph has {', '.join(sorted(known))}")


def _check_starts(name: str, rows: DomainRows) -> None:
    starts = rows.starts
    if starts is None and not rows.count:
        return
    if starts is None or not len(starts) or starts[0] or starts[-1] != rows.count or (starts[1:] < starts[:-1]).any():
        found = None if starts is None else starts.tolist()
        raise ValueError(f"{name} {found} must rise from 0 to the number of rows, {rows.count}")


def _check_index(name: str, need: IndexNeed, rows: DomainRows, end: int) -> None:
    array: Int32 | None = rows.indices.get(need.index.name)
    if array is None:
        if need.keeps or not rows.count:
            return
        raise ValueError(f"the step has no {name}")
    if array.shape != (rows.count * need.width,) or array.dtype != np.int32:
        raise ValueError(f"{name} is {array.dtype} {list(array.shape)}, not int32 [{rows.count * need.width}]")
    check_range(name, array, end, first=-1 if need.keeps else 0)


def _check_cached(need: DomainNeeds, rows: DomainRows, batch: Batch, num_blocks: int, block_size: int) -> None:
    tables, lengths, slots, sequences = batch.block_tables, rows.lengths, rows.slots, len(batch.seq_lens)
    if tables.ndim != 3 or len(tables) <= max(need.groups) or tables.shape[1] != sequences:
        shape = f"[{max(need.groups) + 1} or more, {sequences}, blocks]"
        raise ValueError(f"block_tables are {list(tables.shape)}, not {shape}")
    if lengths is None or lengths.shape != (sequences,) or lengths.dtype != np.int32:
        found = "missing" if lengths is None else f"{lengths.dtype} {list(lengths.shape)}"
        raise ValueError(f"{need.name('lengths')} are {found}, not int32 [{sequences}]")
    check_range(need.name("lengths"), lengths, tables.shape[2] * block_size + 1)
    for number in need.groups:
        read = np.arange(tables.shape[2]) * block_size < lengths[:, None]
        check_range(f"block_tables of {need.name('cache')}", tables[number][read], num_blocks)
    if not rows.count:
        return
    if slots is None or slots.shape != (len(tables), rows.count) or slots.dtype != np.int32:
        found = "missing" if slots is None else f"{slots.dtype} {list(slots.shape)}"
        raise ValueError(f"{need.name('slots')} are {found}, not int32 [{len(tables)}, {rows.count}]")
    check_range(need.name("slots"), slots[list(need.groups)], num_blocks * block_size)


def check_sequences(batch: Batch, max_sequences: int, max_length: int) -> None:
    """Raise UsageError for too many sequences, and ValueError for lengths that do not fit the tokens of the step."""
    count, lengths, starts = len(batch.seq_lens), batch.seq_lens, batch.query_start_loc
    if count > max_sequences:
        raise UsageError(f"a step with {count} requests exceeds the executor's limit of {max_sequences}")
    if len(starts) != count + 1:
        raise ValueError(f"query_start_loc has {len(starts)} entries; {count} requests need {count + 1}")
    check_range("seq_lens", lengths, max_length + 1)
    if (lengths < starts[1:] - starts[:-1]).any():
        raise ValueError(f"seq_lens {lengths.tolist()} are smaller than the numbers of tokens in the step")


def check_range(name: str, numbers: Int32, end: int, *, first: int = 0) -> None:
    """Raise ValueError unless all numbers are at least `first` and less than `end`."""
    if not numbers.size:
        return
    low, high = np.minimum.reduce(numbers, axis=None), np.maximum.reduce(numbers, axis=None)
    if not first <= low <= high < end:
        raise ValueError(f"{name} are {low} to {high}; they must be in {first} to {end - 1}")


def described(needs: Iterable[DomainNeeds]) -> tuple[RowDomain, ...]:
    """Return the domains that need more arrays than a batch's own fields provide, and that `Batch.domains` may
    therefore describe.
    """
    return tuple(
        need.domain
        for need in needs
        if need.domain is not OUTPUTS and (need.domain is not TOKENS or need.components > 1 or need.indices)
    )
