"""Steps for tests: sequences with their blocks, turned into a `Batch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.batch import Batch

BLOCK_SIZE = 4


@dataclass
class Request:
    """One request's tokens and cache blocks; `computed` counts the tokens already in the cache."""

    token_ids: list[int]
    blocks: list[int]
    computed: int = 0


def blocks_for(num_tokens: int, block_size: int = BLOCK_SIZE) -> int:
    """Return the number of blocks that hold this many tokens."""
    return -(-num_tokens // block_size)


def step(
    scheduled: Sequence[tuple[Request, int]],
    *,
    all_logits: bool = True,
    block_size: int = BLOCK_SIZE,
    num_groups: int = 1,
) -> Batch:
    """Make a step of the next `count` tokens of each sequence, which then count as computed.

    all_logits: return logits for all tokens, not only for the last of each sequence.
    num_groups: groups of layers. Block b of a request becomes blocks b * num_groups and the following ones, one per
        group. Its states are in the slot numbered like its first block.
    """
    tokens, positions, starts, lengths, slots = [], [], [0], [], []
    width = max(len(sequence.blocks) for sequence, _ in scheduled)
    tables = np.zeros((len(scheduled), width), np.int32)
    for row, (sequence, count) in enumerate(scheduled):
        span = range(sequence.computed, sequence.computed + count)
        tokens += [sequence.token_ids[i] for i in span]
        positions += list(span)
        slots += [sequence.blocks[i // block_size] * block_size + i % block_size for i in span]
        tables[row, : len(sequence.blocks)] = sequence.blocks
        sequence.computed += count
        starts.append(starts[-1] + count)
        lengths.append(sequence.computed)
    outputs = list(range(len(tokens))) if all_logits else [start - 1 for start in starts[1:]]
    arrays = (np.array(a, np.int32) for a in (tokens, positions, starts, lengths))
    groups = np.arange(num_groups, dtype=np.int32)
    block, offset = np.divmod(np.array(slots, np.int32), np.int32(block_size))
    all_tables = tables * np.int32(num_groups) + groups[:, None, None]
    all_slots = (block * np.int32(num_groups) + groups[:, None]) * np.int32(block_size) + offset
    states = np.array([sequence.blocks[0] for sequence, _ in scheduled], np.int32)
    rows = np.array(outputs, np.int32)
    return Batch(*arrays, all_tables, all_slots, rows, state_slots=states, return_logits=True)
