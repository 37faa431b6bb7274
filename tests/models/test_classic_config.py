"""Configurations of the architectures over `octavo.models._classic`: older files, and values that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.backends import ExecutorLimits, get_backend
from octavo.errors import ModelLoadError, UsageError
from octavo.models import load_architecture
from octavo.models._classic import alibi_slopes
from octavo.models._reading import ConfigReader
from tests.support.tiny_classic import CONFIGS
from tests.support.tiny_models import tiny_graph

SHAPES = {"embed_tokens.weight": (96, 64), "layers.1.input_layernorm.weight": (64,)}
GGUF = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 64,
    "attention.head_count": 4,
    "attention.layer_norm_epsilon": 1e-5,
}


def from_hf(name: str, **changes: Any) -> Any:
    """The configuration of a tiny model with changes; ... leaves a key out."""
    values = {**CONFIGS[name]().to_dict(), **changes}
    module = load_architecture(values["model_type"])
    return module.Config.from_hf(ConfigReader({k: v for k, v in values.items() if v is not ...}))


def from_gguf(architecture: str, **changes: Any) -> Any:
    values = {**GGUF, **{k.replace("__", "."): v for k, v in changes.items()}}
    reader = ConfigReader({f"{architecture}.{k}": v for k, v in values.items()}, f"{architecture}.")
    return load_architecture(architecture).Config.from_gguf(reader, SHAPES)


def test_older_names_of_keys() -> None:
    pythia = from_hf("gpt-neox", rope_parameters=..., rotary_pct=0.25, rotary_emb_base=1000)
    assert pythia == from_hf("gpt-neox")
    bloom = from_hf("bloom", hidden_size=..., n_embed=96, n_head=..., num_attention_heads=6)
    assert bloom == from_hf("bloom")
    grouped = from_hf("falcon-grouped", num_attention_heads=..., n_head=4, num_kv_heads=..., n_head_kv=2)
    assert grouped == from_hf("falcon-grouped")
    assert from_hf("phi", rope_parameters=..., partial_rotary_factor=0.5, rope_theta=1000.0) == from_hf("phi")


def test_alibi_slopes() -> None:
    """The two examples of arXiv 2108.12409, and twelve heads: those of eight, then every other of sixteen."""
    assert alibi_slopes(8) == tuple(2.0**-i for i in range(1, 9))
    sixteen = tuple(2.0 ** (-i / 2) for i in range(1, 17))
    np.testing.assert_allclose(alibi_slopes(16), sixteen)
    np.testing.assert_allclose(alibi_slopes(12), (*alibi_slopes(8), *sixteen[:8:2]))


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_the_table_of_positions_limits_the_length(name: str) -> None:
    graph, weights = tiny_graph(name)
    assert graph.max_positions == from_hf(name).max_position_embeddings == 128
    with pytest.raises(UsageError, match="max_model_len 129 is more than the 128 positions"):
        get_backend("cpu").compile(graph, weights, ExecutorLimits(8, 1, 1, 129))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt2", {"n_head": 3}, "n_head is 3: does not divide the width 64"),
        ("gpt2", {"n_layer": ...}, "num_hidden_layers is missing"),
        ("gpt2", {"activation_function": "swiglu"}, "activation_function is 'swiglu': must be gelu, gelu_new"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
        ("gpt2", {"layer_norm_epsilon": "small"}, "layer_norm_epsilon is 'small': must be a number"),
        ("gpt-neox", {"use_parallel_residual": "no"}, "use_parallel_residual is 'no'"),
        ("gpt-neox", {"rope_parameters": {"rope_type": "spiral"}}, r"rope_parameters\.rope_type is 'spiral'"),
        ("gpt-neox", {"rope_parameters": ..., "rotary_pct": 0.01}, "must rotate an even number"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm is True"),
        ("phi", {"num_key_value_heads": 3}, "num_key_value_heads is 3: does not divide"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine is False"),
        ("falcon-grouped", {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn is 3"),
        ("falcon", {"alibi": 1}, "alibi is 1: must be true or false"),
        ("mpt", {"attn_config": {"alibi": False}}, r"attn_config\.alibi is False: is not supported"),
        ("mpt", {"attn_config": {"prefix_lm": True}}, r"attn_config\.prefix_lm is True"),
        ("mpt", {"attn_config": {"attn_type": "grouped"}}, r"attn_config\.attn_type is 'grouped'"),
        ("mpt", {"attn_config": {"clip_qkv": -1.0}}, r"attn_config\.clip_qkv is -1.0"),
        ("mpt", {"logit_scale": "inv_sqrt_d_model"}, "logit_scale is 'inv_sqrt_d_model'"),
        ("gptj", {"rotary_dim": 17}, "rotary_dim is 17: must be a whole number from 2 to 16"),
        ("gptj", {"rotary_dim": 7}, "rotary_dim is 7: must be even"),
    ],
)
def test_hf_refuses(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        from_hf(name, **changes)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("gpt2", {"block_count": 3}, r"gpt2\.block_count is 3: the file has no tensors of block 2"),
        ("gptneox", {"use_parallel_residual": 1}, r"gptneox\.use_parallel_residual is 1"),
        ("phi2", {"rope__dimension_count": 3}, r"phi2\.rope\.dimension_count is 3: must be even"),
        ("falcon", {"attention__head_count_kv": 3}, r"falcon\.attention\.head_count_kv is 3: does not divide"),
        ("bloom", {"attention__head_count": 5}, r"bloom\.attention\.head_count is 5: does not divide"),
        ("mpt", {"attention__max_alibi_bias": 0.0}, r"mpt\.attention\.max_alibi_bias is 0\.0"),
        ("opt", {}, "GGUF has no standard for OPT"),
        ("gptj", {}, "GGUF has no standard for GPT-J"),
    ],
)
def test_gguf_refuses(architecture: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        from_gguf(architecture, **changes)
