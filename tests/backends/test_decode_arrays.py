"""The arrays of captured steps, written in place, beside those that are made anew for each step."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.backends.torch.graphs import SpareRows
from octavo.backends.torch.step_arrays import DecodeArrays, host_arrays, seen_blocks
from octavo.batch import Batch
from octavo.graph.cache import CacheGroup, CacheLayout
from tests.support.batches import Request, step

LAYOUT = CacheLayout((CacheGroup(None, (0,)), CacheGroup(10, (1,))))
SPARE = SpareRows(2, 64, 4, 9)
SIZE = 4


def batch_of(lengths: list[int], *, has_sources: bool) -> Batch:
    """A step with one token a sequence. lengths: with that token."""
    requests = [Request([*range(5, 5 + n)], [8 * i + j for j in range(8)], n - 1) for i, n in enumerate(lengths)]
    batch = step([(request, 1) for request in requests], num_groups=2)
    if has_sources:
        batch.token_sources = np.arange(len(lengths), dtype=np.int32)[::-1].copy()
    return batch


@pytest.mark.parametrize("spare_slot", [None, 9])
@pytest.mark.parametrize("whole", [False, True])
def test_they_are_those_of_the_padded_step(*, whole: bool, spare_slot: int | None) -> None:
    """Sequences come, go and become longer and shorter: nothing of an earlier step stays."""
    none = np.zeros(0, np.int32)
    tables, slots = np.zeros((2, 0, 1), np.int32), np.zeros((2, 0), np.int32)
    nothing = Batch(none, none, np.zeros(1, np.int32), none, tables, slots, none, state_slots=none)
    sizes = (LAYOUT, 4, spare_slot, 32)
    host = host_arrays(SPARE.padded(nothing, SIZE), *sizes, whole_tables=whole)
    memory = np.empty_like(host.flat)
    arrays = DecodeArrays(host, memory)
    for number, lengths in enumerate(([3], [20, 1, 9, 31], [4, 5], [32, 2, 6], [1], [13, 12, 17, 1])):
        batch = batch_of(lengths, has_sources=number % 2 == 1)
        arrays.write(
            batch, [seen_blocks(batch, g, i, slice(None), 4, whole=whole) for i, g in enumerate(LAYOUT.groups)]
        )
        expected = SPARE.padded(batch, SIZE)
        if batch.token_sources is None:
            expected.token_sources = np.full(SIZE, -1, np.int32)
        np.testing.assert_array_equal(memory, host_arrays(expected, *sizes, whole_tables=whole).flat)
