"""Rotary frequencies against transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from octavo.errors import ModelLoadError
from octavo.graph.ops.attention import RopeParams
from octavo.models._reading import ConfigReader
from octavo.models._rope import rope_from_gguf, rope_from_hf, scaled

LONG = {"short_factor": [1.0 + 0.01 * i for i in range(32)], "long_factor": [1.0 + 0.5 * i for i in range(32)]}
CASES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "llama4 scout": {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0},
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


# Keys of every kind of scaling, each with the rest of a configuration that reads them.
HF_KEYS = {
    "factor": ["linear", "llama3", "yarn", "yarn mscale", "longrope factor"],
    "low_freq_factor": ["llama3"],
    "high_freq_factor": ["llama3"],
    "beta_fast": ["yarn untruncated"],
    "beta_slow": ["yarn untruncated"],
    "mscale": ["yarn mscale"],
    "mscale_all_dim": ["yarn mscale"],
    "attention_factor": ["yarn attention", "longrope"],
    "rope_theta": ["linear", "yarn"],
    "partial_rotary_factor": ["linear"],
}
GGUF_KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    "yarn": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
    "long": {"rope_factors_long.weight": np.ones(32), "rope_factors_short.weight": np.ones(32)},
}
GGUF_KEYS = {
    "rope.scaling.factor": ["linear", "yarn"],
    "rope.scaling.yarn_beta_fast": ["yarn"],
    "rope.scaling.yarn_beta_slow": ["yarn"],
    "rope.scaling.attn_factor": ["yarn", "long"],
    "rope.freq_base": ["linear", "yarn"],
}
HOSTILE = (1e-300, 5e-324, 1e300, -1e-300, -0.5, float("nan"), float("inf"), True, "4")


def gguf(values: dict[str, Any]) -> RopeParams:
    tensors = {name: value for name, value in values.items() if name.endswith(".weight")}
    metadata = {f"llama.{name}": value for name, value in values.items() if name not in tensors}
    return rope_from_gguf(ConfigReader({**tensors, **metadata}, "llama."), 64, 8192)


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize(("key", "case"), [(key, case) for key, cases in HF_KEYS.items() for case in cases])
def test_insane_values_of_config_json_are_refused(key: str, case: str, value: Any) -> None:
    with pytest.raises(ModelLoadError, match=rf"r\.{key} is "):
        ours({"original_max_position_embeddings": 2048, **CASES[case], key: value}, 5e5, 8192)


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize(("key", "kind"), [(key, kind) for key, kinds in GGUF_KEYS.items() for kind in kinds])
def test_insane_values_of_gguf_are_refused(key: str, kind: str, value: Any) -> None:
    with pytest.raises(ModelLoadError, match=rf"llama\.{key} is "):
        gguf({**GGUF_KINDS[kind], key: value})


@pytest.mark.parametrize("value", HOSTILE)
def test_insane_divisors_are_refused(value: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"long_factor\[3\] is "):
        ours(
            {**CASES["longrope"], "original_max_position_embeddings": 2048, "long_factor": [1, 1, 1, value] * 8},
            5e5,
            8192,
        )
    with pytest.raises(ModelLoadError, match=r"rope_freqs\.weight\[3\] is "):
        gguf({"rope_freqs.weight": [1, 1, 1, value] * 8})
    with pytest.raises(ModelLoadError, match=r"llama\.rope\.scale_linear is "):
        gguf({"rope.scale_linear": value})


def test_accepted_extremes_stay_finite() -> None:
    """Every value that is accepted gives finite positive frequencies and attention factors."""
    for case, parameters in CASES.items():
        for extreme in (0.0010001, 0.01, 99.0, 999.0, 1e6):
            for key in (*HF_KEYS, "original_max_position_embeddings"):
                changed = {"original_max_position_embeddings": 2048, **parameters, key: extreme}
                if key == "original_max_position_embeddings":
                    changed[key] = max(int(extreme), 2)
                try:
                    result = ours(changed, 1.0000001, 8192)
                except ModelLoadError:
                    continue
                values = np.array([*result.frequencies, result.attention_factor])
                assert ((values > 0) & (values < np.inf)).all(), (case, key, extreme)
    turnless = gguf({"rope_freqs.weight": [1.0] * 16 + [1e30] * 16})  # as published files write it
    assert min(turnless.frequencies) > 0


def test_turns_must_be_in_order() -> None:
    with pytest.raises(ModelLoadError, match=r"r\.beta_fast is 1\.0: must be at least beta_slow, 2\.0"):
        ours({**CASES["yarn"], "beta_fast": 1.0, "beta_slow": 2.0}, 5e5, 8192)
