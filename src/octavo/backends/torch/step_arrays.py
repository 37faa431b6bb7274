"""The arrays of a step on the device, built from a `Batch` and sent in one copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.backends.torch.step import StepRows
from octavo.batch import Batch, Int32
from octavo.graph.cache import CacheGroup, CacheLayout, first_visible


@dataclass(frozen=True, slots=True)
class VisibleBlocks:
    """The blocks that n sequences see in one group of layers.

    first: position of the first token of the first block.
    end: number of tokens from `first` on that are in the cache after the step.
    """

    tables: Tensor  # [n, width]; entries beyond a sequence's blocks are 0
    first: Tensor  # [n]
    end: Tensor  # [n]


@dataclass(frozen=True, slots=True)
class EqualSequences:
    """The n sequences of a step that have t tokens each.

    rows: rows of their tokens [n * t], or None if the step has no other tokens.
    """

    rows: Tensor | None
    positions: Tensor  # [n, t]
    starts: Tensor  # [n + 1], 0, t, 2 t ...
    windows: tuple[VisibleBlocks, ...]  # one per group of layers
    ends: tuple[int, ...]  # tokens of each sequence in the cache after the step, on the host


@dataclass(frozen=True, slots=True)
class StepArrays:
    """slots: where each token's keys and values are written [groups of layers, T].
    sources: [T], the row of the previous step that produced this token, or -1 if `rows` has the token.
    state_slots: [N].
    is_fresh: [N], 1 for sequences that begin with new states.
    saved_slots: [S, N]; where nothing is saved, the number of a slot that nobody reads.
    The last three are None for a graph without states.
    """

    rows: StepRows
    sources: Tensor
    slots: Tensor
    sequences: tuple[EqualSequences, ...]
    state_slots: Tensor | None = None
    is_fresh: Tensor | None = None
    saved_slots: Tensor | None = None


def sent(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array on the device.

    For a GPU it is sent from its own pinned buffer, without waiting for earlier work.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@dataclass(frozen=True, slots=True)
class HostArrays:
    """The arrays of a step on the host, joined into one array. Their order depends on the step's sequences and the
    sequences' lengths.

    shapes: shapes of the arrays.
    equal: for each `EqualSequences`, the numbers of rows, positions, starts and windows among them, and their ends.
    """

    flat: Int32
    shapes: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    saves: tuple[tuple[int, ...], ...]
    has_types: bool
    has_states: bool
    equal: tuple[tuple[int, int, int, tuple[tuple[int, int, int], ...], tuple[int, ...]], ...]

    def sent(self, device: torch.device) -> Tensor:
        """Return `flat` on the device, int32 [length]."""
        return sent(self.flat, device)

    def views(self, flat: Tensor) -> StepArrays:
        """Return the arrays as views of `flat` on a device, in whatever type it has."""
        pieces = torch.split(flat, [math.prod(shape) for shape in self.shapes])
        found = [piece.reshape(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]
        token_ids, sources, positions, sequence_of, wanted, first_rows = found[:6]
        types, slots, counts, states, is_fresh, saved = found[6:12]
        rows = StepRows(
            token_ids,
            positions,
            sequence_of,
            wanted,
            first_rows,
            self.starts,
            types if self.has_types else None,
            self.saves,
            counts if self.saves else None,
        )
        sequences = tuple(
            EqualSequences(
                None if len(self.equal) == 1 else found[where],
                found[positions_at],
                found[starts_at],
                tuple(VisibleBlocks(*(found[at] for at in window)) for window in windows),
                ends,
            )
            for where, positions_at, starts_at, windows, ends in self.equal
        )
        if not self.has_states:
            return StepArrays(rows, sources, slots, sequences)
        return StepArrays(rows, sources, slots, sequences, states, is_fresh, saved)


def host_arrays(
    batch: Batch,
    layout: CacheLayout,
    block_size: int,
    spare_slot: int | None = None,
    max_tokens: int = 0,
    *,
    whole_tables: bool = False,
) -> HostArrays:
    """Build the arrays of a step on the host.

    spare_slot: a state slot that nobody reads, or None if the graph has no states.
    max_tokens: sequence length for which block tables have room, so that shapes do not depend on lengths. 0 means that
    tables are as short as possible.
    whole_tables: tables begin with the first block of a sequence instead of the first block of its window.
    """
    counts = np.diff(batch.query_start_loc)
    owners = np.repeat(np.arange(len(counts)), counts)
    types = counts[:0] if batch.token_types is None else batch.token_types
    saves = batch.state_saves if spare_slot is not None else None
    save_counts = np.zeros((0, len(counts)), np.int32)
    if saves is not None and (saves[..., 1] >= 0).any():
        save_counts = np.where(saves[..., 1] >= 0, saves[..., 0], 0).T
    arrays: list[NDArray[Any]] = [
        batch.token_ids,
        np.full(len(owners), -1) if batch.token_sources is None else batch.token_sources,
        batch.positions,
        owners,
        batch.output_indices,
        batch.query_start_loc,
        types,
    ]
    arrays += [batch.slot_mapping, save_counts, *_states(batch, counts, spare_slot)]
    equal = []
    for count in np.unique(counts[counts > 0]).tolist():
        chosen = np.flatnonzero(counts == count)
        rows = batch.query_start_loc[chosen][:, None] + np.arange(count)
        at, windows = len(arrays), []
        arrays += [rows.reshape(-1), batch.positions[rows], np.arange(0, rows.size + 1, count)]
        for number, group in enumerate(layout.groups):
            seen = seen_blocks(batch, group, number, chosen, block_size, whole=whole_tables)
            width = -(-max_tokens // block_size) - seen.tables.shape[1]
            tables = np.pad(seen.tables, ((0, 0), (0, width))) if width > 0 else seen.tables
            windows.append((len(arrays), len(arrays) + 1, len(arrays) + 2))
            arrays += [tables, seen.first, seen.end]
        equal.append((at, at + 1, at + 2, tuple(windows), tuple(batch.seq_lens[chosen].tolist())))
    return HostArrays(
        np.concatenate([a.reshape(-1).astype(np.int32) for a in arrays]),
        tuple(a.shape for a in arrays),
        tuple(batch.query_start_loc.tolist()),
        tuple(tuple(each) for each in save_counts.tolist()),
        batch.token_types is not None,
        spare_slot is not None,
        tuple(equal),
    )


def _states(batch: Batch, counts: NDArray[Any], spare_slot: int | None) -> tuple[NDArray[Any], ...]:
    """Return state_slots, is_fresh and saved_slots; empty without states."""
    if spare_slot is None or batch.state_slots is None:
        return counts[:0], counts[:0], counts[:0]
    begins = batch.query_start_loc[:-1]
    is_fresh = (counts > 0) & (batch.positions[np.minimum(begins, len(batch.positions) - 1)] == 0)
    saved = np.full((1, len(counts)), spare_slot)
    if batch.state_saves is not None:
        saved = np.where(batch.state_saves[..., 1] >= 0, batch.state_saves[..., 1], spare_slot).T
    return batch.state_slots, is_fresh, saved


class SeenBlocks(NamedTuple):
    """`VisibleBlocks` on the host."""

    tables: Int32
    first: Int32
    end: Int32


class DecodeArrays:
    """The arrays of steps with one token per sequence, in memory that each step overwrites.

    The rows after a step's sequences are padding. They contain what they contained at creation, when all rows were
    padding.
    """

    def __init__(self, host: HostArrays, memory: Int32) -> None:
        """host: arrays of a step that consists of padding rows, all alike.
        memory: [len(host.flat)].
        """
        memory[:] = host.flat
        ends = np.cumsum([math.prod(shape) for shape in host.shapes])
        found = [part.reshape(shape) for part, shape in zip(np.split(memory, ends[:-1]), host.shapes, strict=True)]
        token_ids, sources, positions = found[:3]
        slots, _, states, is_fresh = found[7:11]
        ((_, positions_at, _, windows, _),) = host.equal
        # In the order of the values in `write`. The last axis counts rows.
        self._rows = [token_ids, sources, positions, found[positions_at].reshape(-1), slots]
        self._rows += [states, is_fresh] if host.has_states else []
        self._tables: list[Int32] = []
        for tables_at, first_at, end_at in windows:
            self._tables.append(found[tables_at])
            self._rows += [found[first_at], found[end_at]]
        self._spare_rows = [array[..., -1:].copy() for array in self._rows]
        self._spare_tables = [table[-1].copy() for table in self._tables]
        self._has_states, self._num_groups = host.has_states, len(windows)
        self._count, self._widths = 0, [0] * len(windows)  # of the previous step

    def write(self, batch: Batch, seen: Sequence[SeenBlocks]) -> None:
        """Write a step that has no more sequences than there are rows.

        seen: visible blocks of each group of layers.
        """
        count, before = len(batch.seq_lens), self._count
        sources = -1 if batch.token_sources is None else batch.token_sources
        values: list[Any] = [batch.token_ids, sources, batch.positions, batch.positions]
        values.append(batch.slot_mapping[: self._num_groups])
        if self._has_states:
            values += [batch.state_slots, batch.positions == 0]
        for blocks in seen:
            values += [blocks.first, blocks.end]
        for array, value, spare in zip(self._rows, values, self._spare_rows, strict=True):
            array[..., :count] = value
            if count < before:
                array[..., count:before] = spare
        for number, (table, blocks) in enumerate(zip(self._tables, seen, strict=True)):
            width, former = blocks.tables.shape[1], self._widths[number]
            table[:count, :width] = blocks.tables
            if width < former:
                table[:count, width:former] = 0
            if count < before:
                table[count:before] = self._spare_tables[number]
            self._widths[number] = width
        self._count = count


def seen_blocks(
    batch: Batch,
    group: CacheGroup,
    number: int,
    chosen: NDArray[np.intp] | slice,
    block_size: int,
    *,
    whole: bool = False,
) -> SeenBlocks:
    """Return the blocks of a group of layers that the tokens of these sequences see, without the blocks before their
    window.

    whole: include the blocks before the window, as zeros.
    """
    lengths, available = batch.seq_lens[chosen], batch.block_tables[number, chosen]
    ends = -(-lengths // block_size)
    start = np.zeros_like(lengths) if group.window is None else _first_blocks(batch, group, chosen, block_size)
    width = int((ends if whole else ends - start).max(initial=0))
    column = np.arange(width, dtype=np.int32)
    if whole or group.window is None:  # columns are block numbers
        is_there = column < ends[:, None]
        if group.window is not None:
            is_there &= column >= start[:, None]
        tables = available[:, :width]
    else:
        is_there = column < (ends - start)[:, None]
        tables = np.take_along_axis(available, np.where(is_there, start[:, None] + column, 0), axis=1)
    tables = np.where(is_there, tables, 0).astype(np.int32, copy=False)
    first = np.zeros_like(start) if whole else start * block_size
    return SeenBlocks(tables, first, lengths - first)


def _first_blocks(batch: Batch, group: CacheGroup, chosen: NDArray[np.intp] | slice, block_size: int) -> Int32:
    """Return the first block of each sequence that any of its tokens sees."""
    has_tokens = np.diff(batch.query_start_loc)[chosen] > 0
    begins = np.where(has_tokens, batch.query_start_loc[:-1][chosen], 0)
    positions = np.where(has_tokens, batch.positions[begins], batch.seq_lens[chosen])
    if batch.late is not None:  # all of its drafts may be wrong
        positions = np.maximum(positions - batch.late.num_drafts[chosen], 0)
    earliest = positions.tolist()
    visible = [first_visible(position, group.window, chunked=group.chunked) for position in earliest]
    return np.array(visible, np.int32) // block_size
