"""Rotary frequencies against transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from octavo.graph.ops import RopeParams
from octavo.models._reading import ConfigReader
from octavo.models._rope import rope_from_hf, scaled

LONG = {"short_factor": [1.0 + 0.01 * i for i in range(32)], "long_factor": [1.0 + 0.5 * i for i in range(32)]}
CASES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 16.0},
    "yarn untruncated": {"rope_type": "yarn", "factor": 3.0, "truncate": False, "beta_fast": 20.0, "beta_slow": 2.0},
    "yarn mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn attention": {"rope_type": "yarn", "factor": 40.0, "attention_factor": 0.9},
    "longrope": {"rope_type": "longrope", **LONG},
    "longrope factor": {"rope_type": "longrope", "factor": 8.0, **LONG},
}


def ours(parameters: dict[str, Any], theta: float, max_positions: int) -> RopeParams:
    return rope_from_hf(ConfigReader({"r." + k: v for k, v in parameters.items()}, "r."), 64, theta, max_positions)


@pytest.mark.parametrize("case", CASES)
def test_scalings(case: str) -> None:
    parameters = {"original_max_position_embeddings": 2048, **CASES[case]}
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=8192,
        rope_parameters={**parameters, "rope_theta": 5e5},
    )
    expected, attention_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", seq_len=8192)
    result = ours(parameters, 5e5, 8192)
    np.testing.assert_allclose(result.frequencies, expected.numpy(), rtol=2e-6)
    assert result.attention_factor == pytest.approx(attention_factor, rel=1e-6)


def test_longrope_within_the_original_context() -> None:
    result = ours({"rope_type": "longrope", "original_max_position_embeddings": 8192, **LONG}, 1e4, 8192)
    np.testing.assert_allclose(result.frequencies, scaled(64, 1e4, LONG["short_factor"]).frequencies)
    assert result.attention_factor == 1.0


def test_default_and_partial() -> None:
    np.testing.assert_allclose(scaled(8, 1e4).frequencies, [1.0, 0.1, 0.01, 0.001])
    half = ours({"partial_rotary_factor": 0.5}, 1e4, 4096)
    assert half == scaled(32, 1e4)
    assert ours({"rope_type": "dynamic", "factor": 2.0}, 1e4, 4096) == scaled(64, 1e4)
