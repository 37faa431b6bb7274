"""The encoders of `tests/support/quantize.py`: what they write reads back within the step of the type."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.quantize import encodable_types, quantized, random_weight

# The largest error of standard normal rows relative to their largest magnitude.
TOLERANCES = {
    "F32": 0,
    "F16": 5e-4,
    "BF16": 4e-3,
    "Q8_0": 5e-3,
    "Q6_K": 0.02,
    "Q5_K": 0.035,
    "Q5_0": 0.07,
    "Q5_1": 0.04,
    "Q4_K": 0.07,
    "Q4_0": 0.13,
    "Q4_1": 0.07,
    "IQ4_NL": 0.13,
    "IQ4_XS": 0.13,
    "Q3_K": 0.2,
    "Q2_K": 0.35,
    "MXFP4": 0.35,
    "TQ2_0": 0.51,
}


@pytest.mark.parametrize("type_name", encodable_types())
def test_values_read_back_within_a_step(type_name: str) -> None:
    values = np.random.default_rng(5).standard_normal((8, 512), dtype=np.float32)
    weight = quantized(type_name, values)
    assert weight.shape == (8, 512)
    error = np.abs(weight.dequantize() - values).max() / np.abs(values).max()
    assert error <= TOLERANCES[type_name]


@pytest.mark.parametrize("type_name", encodable_types())
def test_zeros_read_back_as_zeros(type_name: str) -> None:
    np.testing.assert_array_equal(quantized(type_name, np.zeros((2, 256))).dequantize(), 0)


@pytest.mark.parametrize("type_name", ["Q1_0", "Q8_K", "IQ1_M", "IQ2_XXS", "TQ1_0", "NVFP4", "Q4_K", "BF16"])
def test_random_weights_are_finite(type_name: str) -> None:
    values = random_weight(type_name, (4, 512), seed=9).dequantize()
    assert np.isfinite(values).all()
    assert values.std() > 0
