"""The weight of each row in the products of a matrix's inputs."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.compress.checkpoints.input_statistics import evened


def test_a_share_of_the_weight_is_the_same_for_all_rows() -> None:
    x = np.array([[1, -1], [1, 1], [-4, 4], [0, 0]], np.float32)
    np.testing.assert_array_equal(evened(x, 0), x)
    np.testing.assert_allclose(np.square(evened(x, 1)).mean(1), [1, 1, 1, 0], rtol=1e-6)
    # The mean square is 4.5; row by row half of it goes to all alike and half by the row's own.
    np.testing.assert_allclose(np.square(evened(x, 0.5)).mean(1), [0.5 + 0.5 / 4.5] * 2 + [0.5 + 8 / 4.5, 0], rtol=1e-6)


@pytest.mark.parametrize("evenness", [0.5, 1])
def test_inputs_that_overflow_are_not_left_out(evenness: float) -> None:
    x = np.array([[1, -1], [1e20, 1]], np.float32)
    with np.errstate(over="ignore"):
        assert np.isnan(evened(x, evenness)).all()
