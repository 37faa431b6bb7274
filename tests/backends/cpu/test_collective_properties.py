"""Any series of exchanges, with slow ranks between them, over buffers that are smaller than the values."""

from __future__ import annotations

import secrets
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.backends.cpu import _native, _native_tests
from octavo.batch import Array

Exchange = tuple[bool, int, int, int]  # a sum, else gathered columns; rows; columns; the rank that comes late


def values(rank: int, at: int, rows: int, cols: int) -> Array:
    return np.random.default_rng([rank, at]).standard_normal((rows, cols)).astype(np.float32)


def run(name: str, rank: int, size: int, exchanges: list[Exchange]) -> list[Array]:
    """A rank on a thread: its buffer holds 2032 numbers. If another one fails, it ends after a minute."""
    limits = {"join_ms": 60_000, "deadline_ms": 60_000}
    group, found = _native.CollectiveGroup(name, rank, size, buffer_bytes=4096, **limits), []
    for at, (is_sum, rows, cols, late) in enumerate(exchanges):
        if late == rank:
            time.sleep(0.002)  # timed: the rank that comes late
        x = values(rank, at, rows, cols + (0 if is_sum else rank))
        if is_sum:
            _native_tests.all_reduce(group, x)
            found.append(x)
        else:
            gathered = np.empty((rows, sum(cols + r for r in range(size))), np.float32)
            _native_tests.all_gather(group, x, gathered)
            found.append(gathered)
    return found


@settings(max_examples=20, deadline=None)
@given(
    size=st.integers(2, 4),
    exchanges=st.lists(
        st.tuples(st.booleans(), st.integers(1, 40), st.integers(1, 400), st.integers(-1, 3)), min_size=1, max_size=12
    ),
)
def test_every_exchange_gives_all_ranks_the_same(size: int, exchanges: list[Exchange]) -> None:
    name = secrets.token_hex(6)
    with ThreadPoolExecutor(size) as pool:
        ranks = list(pool.map(lambda rank: run(name, rank, size, exchanges), range(size)))
    for at, (is_sum, rows, cols, _) in enumerate(exchanges):
        parts = [values(rank, at, rows, cols + (0 if is_sum else rank)) for rank in range(size)]
        expected = parts[0]
        for part in parts[1:]:
            expected = expected + part if is_sum else np.concatenate([expected, part], axis=1)
        for found in ranks:
            np.testing.assert_array_equal(found[at], expected)
