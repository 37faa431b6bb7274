"""The rounding of keys and values by the types of the cache."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.graph.ops.kv_rounding import round_keys, round_values

HEAD_DIMS = [8, 20, 64, 80, 96, 112, 128, 200, 256]


def normal(head_dim: int, rows: int = 50) -> np.ndarray:
    return np.random.default_rng(head_dim).standard_normal((rows, 2, head_dim)).astype(np.float32)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_int8_is_within_half_a_step_of_the_largest(head_dim: int, dtype: type) -> None:
    x = normal(head_dim).astype(dtype)
    values = round_values(x, "int8")
    assert values.dtype == dtype
    step = np.abs(x).max(axis=-1, keepdims=True) / 127
    assert (np.abs(values - x) <= step / 2 * 1.008).all()
    keys = round_keys(x, "int8")
    assert keys.dtype == dtype
    assert np.sqrt(np.mean((keys - x) ** 2)) < 0.009
    assert np.abs(keys - x).max() < 0.06


def test_outliers_of_keys_cost_others_little() -> None:
    """One dimension a hundred times the others: without mixing the step would be nearly one."""
    x = normal(64)
    x[..., 7] += 100
    error = np.delete(round_keys(x, "int8") - x, 7, axis=-1)
    without = np.delete(round_values(x, "int8") - x, 7, axis=-1)
    assert np.sqrt(np.mean(error**2)) < 0.08
    assert np.sqrt(np.mean(without**2)) > 0.2


def test_int8_knows_zero_tiny_and_large_numbers() -> None:
    zeros = np.zeros((1, 64), np.float32)
    assert np.array_equal(round_values(zeros, "int8"), zeros)
    assert np.array_equal(round_keys(zeros, "int8"), zeros)
    for size in (1e-30, 1e-6, 1e6, 1e30):
        x = (normal(64) * np.float32(size)).astype(np.float32)
        for rounded in (round_values(x, "int8"), round_keys(x, "int8")):
            assert np.abs(rounded - x).max() < 0.06 * size


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_stays_no_number(bad: float) -> None:
    x = normal(64)
    x[3, 1, 5] = bad
    for rounded in (round_values(x, "int8"), round_keys(x, "int8")):
        assert np.isnan(rounded[3, 1]).all()
        assert np.isfinite(rounded[3, 0]).all()
        assert np.isfinite(rounded[:3]).all()


def test_float16_saturates_and_none_changes_nothing() -> None:
    x = np.array([[1e9, -1e9, 1.0002, np.nan, np.inf, -np.inf]])
    for round_to in (round_keys, round_values):
        np.testing.assert_array_equal(round_to(x, "float16"), [[65504.0, -65504.0, 1.0, np.nan, np.nan, np.nan]])
        np.testing.assert_array_equal(round_to(x, None), x)
