"""The configurations of models with states: what they refuse, by name of the key."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

from octavo.errors import ModelLoadError
from octavo.loader.checkpoint import open_checkpoint
from octavo.models import build_graph, load_architecture
from octavo.models._reading import ConfigReader
from tests.support import converted_gguf, tiny_hybrids, tiny_state_spaces
from tests.support.tiny_models import tiny_model

CONFIGS = {**tiny_hybrids.CONFIGS, **tiny_state_spaces.CONFIGS}


def from_hf(name: str, **changes: Any) -> Any:
    values = CONFIGS[name]().to_dict() | changes
    reader = ConfigReader({key: value for key, value in values.items() if value is not ...})
    return load_architecture(values["model_type"]).Config.from_hf(reader)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("lfm2", {"layer_types": ["conv", "sliding_attention", "conv", "conv"]}, "layer_types is 'sliding_attention'"),
        ("lfm2", {"layer_types": ["conv"]}, "layer_types is .* must be 4 strings"),
        ("lfm2", {"norm_eps": 2.0}, r"norm_eps is 2\.0"),
        ("qwen3next", {"layer_types": ["mamba"] * 4}, "layer_types is 'mamba'"),
        ("qwen3next", {"linear_num_key_heads": 3}, "linear_num_key_heads is 3: must divide the 4 value heads"),
        ("qwen3next", {"linear_key_head_dim": 1 << 30}, "linear_key_head_dim is 1073741824"),
        ("qwen35moe", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5"),
        ("granitehybrid", {"layer_types": ["linear_attention", "rnn"] * 2}, "layer_types is 'rnn'"),
        ("granitehybrid", {"mamba_n_groups": 3}, "mamba_n_groups is 3: does not divide 8 heads"),
        ("granitehybrid", {"time_step_limit": [0.0, 0.1]}, "time_step_limit is .* steps are not limited"),
        ("granitehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'"),
        ("granitehybrid", {"mamba_d_state": 0}, "mamba_d_state is 0"),
        ("granitehybrid", {"mamba_d_head": 1 << 18}, "too wide"),
        ("nemotron-h", {"hybrid_override_pattern": "M-X"}, "hybrid_override_pattern is 'M-X'"),
        ("nemotron-h", {"layers_block_type": ["rnn"]}, "layers_block_type is 'rnn'"),
        ("nemotron-h", {"layers_block_type": []}, "layers_block_type is .* must have the kinds of 1 to"),
        ("nemotron-h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu': must be relu2"),
        ("nemotron-h", {"time_step_limit": [0.0, 0.1]}, "time_step_limit is .* steps are not limited"),
        ("nemotron-h", {"n_groups": 3}, "n_groups is 3: does not divide 8 heads"),
        ("zamba2", {"layers_block_type": ["hybrid", "rnn", "hybrid", "hybrid"]}, "layers_block_type is 'rnn'"),
        ("kimi-linear", {"mla_use_nope": False}, "mla_use_nope is False: must be true"),
        ("kimi-linear", {"layer_types": ["linear_attention", "mamba"] * 2}, "layer_types is 'mamba'"),
        ("kimi-linear", {"layer_types": ..., "linear_attn_config": {"full_attn_layers": [5]}}, "from 1 to 4"),
        ("kimi-linear", {"linear_head_dim": 0}, "linear_head_dim is 0"),
        ("recurrent-gemma", {"block_types": ["mamba"]}, "block_types is 'mamba': must be recurrent or attention"),
        ("recurrent-gemma", {"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ("zamba2", {"n_mamba_heads": 7}, "n_mamba_heads is 7: must divide 128 columns"),
        ("zamba2", {"mamba_ngroups": 3}, "mamba_ngroups is 3: does not divide 8 heads"),
        ("zamba2", {"tie_word_embeddings": False}, "tie_word_embeddings is False: must be true"),
        ("zamba2", {"hidden_act": "silu"}, "hidden_act is 'silu': must be gelu"),
        ("mamba", {"hidden_act": "gelu"}, "hidden_act is 'gelu': must be silu"),
        ("jamba", {"mamba_d_state": 0}, "mamba_d_state is 0"),
        ("bamba", {"time_step_limit": [0.0, 0.1]}, "time_step_limit is .* steps are not limited"),
        ("bamba", {"hidden_act": "gelu"}, "hidden_act is 'gelu': must be silu"),
        ("falcon-h1", {"ssm_multipliers": [1.0, 2.0]}, "ssm_multipliers is .* must be 5 numbers"),
        ("falcon-h1", {"mlp_multipliers": "1"}, "mlp_multipliers is .* must be 2 numbers"),
        ("falcon-h1", {"mamba_n_groups": 3}, "mamba_n_groups is 3: does not divide 8 heads"),
        ("mamba2", {"hidden_act": "gelu"}, "hidden_act is 'gelu': must be silu"),
        ("mamba2", {"n_groups": 3}, "n_groups is 3: does not divide 8 heads"),
        ("mamba2", {"time_step_limit": [0.1, 1.0]}, "time_step_limit is .* steps are not limited"),
    ],
)
def test_hf_refuses(name: str, changes: dict[str, Any], message: str) -> None:
    from_hf(name)
    with pytest.raises(ModelLoadError, match=message):
        from_hf(name, **changes)


def test_infinity_as_older_versions_of_transformers_write_it(tmp_path: Path) -> None:
    model = tiny_model("granitehybrid")
    model.save_pretrained(tmp_path)
    values = model.config.to_dict() | {"time_step_limit": [0.0, math.inf]}
    (tmp_path / "config.json").write_text(json.dumps(values, default=str))
    assert "Infinity]" in (tmp_path / "config.json").read_text()
    assert open_checkpoint(tmp_path).config == from_hf("granitehybrid")


def test_older_names_of_layers_and_sections() -> None:
    """Published files: Granite says mamba and attention, Qwen 3.5 keeps its text in a section."""
    kinds = ["mamba", "attention", "mamba", "mamba"]
    older = from_hf("granitehybrid", layer_types=kinds, time_step_limit=..., mamba_d_head=16)
    assert older == from_hf("granitehybrid")
    text = CONFIGS["qwen35moe"]().to_dict()
    outer = {"model_type": "qwen3_5_moe", "text_config": text, "tie_word_embeddings": False}
    config = load_architecture("qwen3_5_moe").Config
    assert config.from_hf(ConfigReader(outer)) == config.from_hf(ConfigReader(text))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"block_ff_dim": 640},
        {"block_ff_dim": 640, "block_multiple_of": 32},
        {"block_ff_dim": 641, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.3},
        {"block_auto_adjust_ff_dim": False},
        {"block_auto_adjust_ff_dim": False, "block_ff_dim": 640, "full_attn_idxs": [1], "layer_types": ...},
    ],
)
def test_lfm2_widths_under_older_keys(changes: dict[str, Any]) -> None:
    """The published files of LFM2 say the width before an adjustment, and the layers as a list of indices."""
    values = {key: value for key, value in CONFIGS["lfm2"]().to_dict().items() if not key.startswith("block_")}
    values |= {"block_multiple_of": 256, **changes}
    values = {key: value for key, value in values.items() if value is not ...}
    judge = Lfm2MLP(Lfm2Config(**values))
    found = load_architecture("lfm2").Config.from_hf(ConfigReader(values))
    assert found.mlp.intermediate_size == judge.w1.out_features


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("lfm2", {"lfm2.attention.head_count_kv": [2, 0]}, r"head_count_kv is \[2, 0\]: must be 4 whole numbers"),
        ("lfm2", {"lfm2.attention.head_count_kv": [0, 2, 0, -1]}, r"head_count_kv\[3\] is -1"),
        ("qwen35", {"qwen35.ssm.inner_size": 95}, r"qwen35\.ssm\.inner_size is 95: must be a multiple of 4 heads"),
        ("qwen35", {"qwen35.ssm.group_count": 3}, r"qwen35\.ssm\.group_count is 3: must divide"),
        ("granitehybrid", {"granitehybrid.ssm.group_count": 3}, r"ssm\.group_count is 3: does not divide 8"),
        ("granitehybrid", {"granitehybrid.ssm.inner_size": 9}, r"ssm\.inner_size is 9: must be a multiple"),
    ],
)
def test_gguf_refuses(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(converted_gguf.save_gguf(tiny_model(name), tmp_path / "model.gguf"))
    metadata = {**checkpoint.file.metadata, **changes}
    config = load_architecture(checkpoint.architecture).Config
    with pytest.raises(ModelLoadError, match=message):
        config.from_gguf(ConfigReader(metadata, f"{name}."), checkpoint.weights.shapes)


def test_older_names_of_nemotron() -> None:
    """Published files: a pattern or a list of older names, and older keys."""
    changes = {"head_dim": ..., "attention_head_dim": 16, "layer_norm_epsilon": ..., "norm_eps": 1e-5}
    kinds = ["mamba", "mlp", "mamba", "attention", "mlp"]
    for key, value in (("hybrid_override_pattern", "M-M*-"), ("layer_types", kinds)):
        assert from_hf("nemotron-h", layers_block_type=..., **{key: value}, **changes) == from_hf("nemotron-h")


def test_blocks_for_further_tokens_are_left_out(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(converted_gguf.save_gguf(tiny_model("qwen35"), tmp_path / "model.gguf"))
    metadata = {**checkpoint.file.metadata, "qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    config = load_architecture("qwen35").Config.from_gguf(ConfigReader(metadata, "qwen35."), checkpoint.weights.shapes)
    assert config == checkpoint.config
    assert build_graph("qwen35", config, checkpoint.weights.shapes).makes_logits


def test_the_authors_form_of_kimi_linear() -> None:
    """Their keys, with layers that count from 1, mean what those of transformers mean."""
    own = {
        "linear_attn_config": {"head_dim": 16, "num_heads": 4, "full_attn_layers": [2, 4], "kda_layers": [1, 3]},
        "first_k_dense_replace": 1,
    }
    left_out = dict.fromkeys(("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads"), ...)
    assert from_hf("kimi-linear", **left_out, **own) == from_hf("kimi-linear")
