"""Tiny random models of the families with Mamba's state spaces, and how GGUF converters change them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray
from transformers import (
    BambaConfig,
    FalconH1Config,
    FalconMambaConfig,
    JambaConfig,
    KimiLinearConfig,
    Mamba2Config,
    MambaConfig,
    NemotronHConfig,
    PreTrainedConfig,
    RecurrentGemmaConfig,
    Zamba2Config,
)

from tests.support.tiny_sizes import SIZES

_SIZES = {**SIZES, "num_hidden_layers": 4}
_NEMOTRON = {
    **{key: value for key, value in SIZES.items() if key != "num_hidden_layers"},
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 24,
    "n_groups": 2,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 40,
}

_MAMBA = {**_SIZES, "mamba_n_heads": 8, "mamba_d_state": 24}
_FACTORS = {
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.5,
    "mlp_multipliers": [0.7, 1.6],
    "key_multiplier": 0.4,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.6,
    "ssm_multipliers": [0.8, 1.4, 0.6, 1.7, 0.5],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.9,
}
_NO_ATTENTION = {
    key: SIZES[key] for key in ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id", "pad_token_id")
}
_NO_ATTENTION |= {"num_hidden_layers": 3}
_MAMBA2 = {**_NO_ATTENTION, "num_heads": 8, "head_dim": 16, "state_size": 24}
_ZAMBA = {**_SIZES, "num_key_value_heads": 4, "n_mamba_heads": 8, "mamba_d_state": 24, "adapter_rank": 8}
_KIMI = {key: value for key, value in _SIZES.items() if "attention_heads" not in key and "key_value" not in key}
_KIMI |= {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "moe_intermediate_size": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}
_GRIFFIN = {key: value for key, value in _SIZES.items() if "key_value" not in key and "max_position" not in key}
_JAMBA = {**_SIZES, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 12}

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "nemotron-h": lambda: NemotronHConfig(**_NEMOTRON, hybrid_override_pattern="M-M*-"),
    "nemotron-h-moe": lambda: NemotronHConfig(
        **_NEMOTRON,
        layers_block_type=["linear_attention", "moe", "full_attention", "moe", "linear_attention"],
        n_routed_experts=8,
        num_experts_per_tok=3,
        routed_scaling_factor=2.5,
    ),
    "nemotron-h-latent": lambda: NemotronHConfig(
        **_NEMOTRON,
        layers_block_type=["moe", "linear_attention", "mlp", "full_attention", "moe"],
        n_routed_experts=8,
        moe_latent_size=32,
        n_group=4,
        topk_group=2,
        norm_topk_prob=False,
        use_bias=True,
        mlp_bias=True,
        use_conv_bias=False,
        conv_kernel=3,
    ),
    "bamba": lambda: BambaConfig(**_MAMBA, attn_layer_indices=[1]),
    "bamba-biased": lambda: BambaConfig(
        **_MAMBA,
        attn_layer_indices=[0, 3],
        mamba_d_head=16,
        mamba_n_groups=2,
        mamba_d_conv=3,
        mamba_conv_bias=False,
        mamba_proj_bias=True,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
    "falcon-h1": lambda: FalconH1Config(**_MAMBA, **_FACTORS, mamba_d_ssm=96, mamba_n_groups=2),
    "falcon-h1-normed": lambda: FalconH1Config(
        **_MAMBA, **_FACTORS, mamba_d_ssm=None, mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_n_groups=2
    ),
    "falcon-h1-biased": lambda: FalconH1Config(
        **_MAMBA,
        **_FACTORS,
        mamba_d_ssm=64,
        mamba_rms_norm=True,
        mamba_conv_bias=False,
        mamba_proj_bias=True,
        projectors_bias=True,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
    "mamba2": lambda: Mamba2Config(**_MAMBA2, n_groups=2),
    "mamba2-biased": lambda: Mamba2Config(
        **_MAMBA2, n_groups=1, use_bias=True, use_conv_bias=False, conv_kernel=3, tie_word_embeddings=True
    ),
    "mamba": lambda: MambaConfig(**_NO_ATTENTION),
    "mamba-biased": lambda: MambaConfig(
        **_NO_ATTENTION,
        state_size=10,
        time_step_rank=7,
        conv_kernel=3,
        use_bias=True,
        use_conv_bias=False,
        tie_word_embeddings=False,
    ),
    "falcon-mamba": lambda: FalconMambaConfig(**_NO_ATTENTION, mixer_rms_eps=1e-5),
    "kimi-linear": lambda: KimiLinearConfig(
        **_KIMI, num_attention_heads=4, num_key_value_heads=4, n_group=1, topk_group=1
    ),
    "kimi-linear-groups": lambda: KimiLinearConfig(
        **_KIMI,
        num_attention_heads=2,
        num_key_value_heads=2,
        linear_conv_kernel_dim=3,
        q_lora_rank=24,
        n_group=4,
        topk_group=2,
        norm_topk_prob=False,
        mlp_layer_types=["dense", "dense", "sparse", "sparse"],
    ),
    # The square root of this width is no bfloat16, unlike that of the others.
    "recurrent-gemma": lambda: RecurrentGemmaConfig(
        **{**_GRIFFIN, "hidden_size": 96, "num_attention_heads": 2}, num_key_value_heads=1, attention_window_size=7
    ),
    "recurrent-gemma-wide": lambda: RecurrentGemmaConfig(
        **_GRIFFIN,
        lru_width=128,
        attention_bias=True,
        conv1d_width=3,
        logits_soft_cap=4.0,
        block_types=["attention", "recurrent"],
        tie_word_embeddings=False,
    ),
    "jamba": lambda: JambaConfig(**_JAMBA, num_experts=4, expert_layer_period=2, expert_layer_offset=0),
    "zamba2": lambda: Zamba2Config(
        **_ZAMBA,
        layers_block_type=["linear_attention", "hybrid", "hybrid", "hybrid"],
        num_mem_blocks=2,
        use_mem_rope=True,
        use_shared_attention_adapter=True,
    ),
    "zamba2-plain": lambda: Zamba2Config(
        **{**_ZAMBA, "num_key_value_heads": 2},
        layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"],
        mamba_ngroups=2,
        mamba_d_conv=3,
        add_bias_linear=True,
    ),
    "jamba-dense": lambda: JambaConfig(
        **_JAMBA,
        num_experts=1,
        mamba_dt_rank=5,
        mamba_d_conv=3,
        mamba_conv_bias=False,
        mamba_proj_bias=True,
        tie_word_embeddings=True,
    ),
}

# GGUF files have no place for what makes these special; those of Bamba have Granite's architecture.
WITHOUT_GGUF = {"bamba", "bamba-biased", "falcon-h1-biased", "zamba2", "zamba2-plain"}
WITHOUT_GGUF |= {"kimi-linear", "kimi-linear-groups", "recurrent-gemma", "recurrent-gemma-wide"}

Tensors = dict[str, NDArray[np.float32]]

_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def gguf_architecture(config: PreTrainedConfig) -> str | None:
    """Return the name of the architecture in GGUF files, or None if another test file handles the model."""
    if config.model_type == "nemotron_h":
        return "nemotron_h_moe" if "moe" in config.layers_block_type else "nemotron_h"
    return {
        "falcon_h1": "falcon-h1",
        "mamba2": "mamba2",
        "mamba": "mamba",
        "falcon_mamba": "mamba",
        "jamba": "jamba",
    }.get(config.model_type)


def save_gguf(config: PreTrainedConfig, tensors: Tensors, path: Path) -> Path:
    """Write the model as llama.cpp's converter does, under the names of the gguf package, every tensor as F32."""
    name = gguf_architecture(config)
    assert name is not None
    architecture = next(a for a, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    writer = gguf.GGUFWriter(path, name)
    _add_common(writer, config)
    families = {"nemotron_h": _add_nemotron, "falcon_h1": _add_falcon, "mamba2": _add_mamba2, "jamba": _add_jamba}
    families.get(config.model_type, _add_mamba)(writer, config)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, array in _converted(config, _stacked(tensors)):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        known = names.get_name(name, (".weight", ".bias"))
        assert known is not None, name
        writer.add_tensor(known, np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_common(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    """Add the keys that all models have, and a tokenizer with the right number of tokens."""
    eps = "layer_norm_epsilon" if hasattr(config, "layer_norm_epsilon") else "rms_norm_eps"
    writer.add_layer_norm_rms_eps(getattr(config, eps))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(getattr(config, "max_position_embeddings", 1 << 20))
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(getattr(config, "num_attention_heads", 0))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(["t 1"])


def _add_nemotron(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    kinds, has_experts = config.layers_block_type, "moe" in config.layers_block_type
    writer.add_head_count_kv([config.num_key_value_heads if kind == "full_attention" else 0 for kind in kinds])
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    width, kind = (config.moe_intermediate_size, "moe") if has_experts else (config.intermediate_size, "mlp")
    writer.add_feed_forward_length([width if other == kind else 0 for other in kinds])
    _add_scan(
        writer,
        inner=config.mamba_num_heads * config.mamba_head_dim,
        heads=config.mamba_num_heads,
        groups=config.n_groups,
        state=config.ssm_state_size,
        taps=config.conv_kernel,
    )
    if has_experts:
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.moe_latent_size is not None:
        writer.add_moe_latent_size(config.moe_latent_size)


def _add_falcon(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    head_dim = config.hidden_size // config.num_attention_heads
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _add_scan(
        writer,
        inner=config.mamba_d_ssm or config.mamba_expand * config.hidden_size,
        heads=config.mamba_n_heads,
        groups=config.mamba_n_groups,
        state=config.mamba_d_state,
        taps=config.mamba_d_conv,
    )


def _add_mamba2(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_feed_forward_length(0)
    _add_scan(
        writer,
        inner=config.num_heads * config.head_dim,
        heads=config.num_heads,
        groups=config.n_groups,
        state=config.state_size,
        taps=config.conv_kernel,
    )


def _add_mamba(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_feed_forward_length(0)
    _add_channels(writer, config, config.state_size, config.conv_kernel, config.time_step_rank)
    writer.add_ssm_dt_b_c_rms(config.model_type == "falcon_mamba")


def _add_jamba(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    kinds = config.layers_block_type
    writer.add_head_count_kv([config.num_key_value_heads if kind == "attention" else 0 for kind in kinds])
    writer.add_feed_forward_length(config.intermediate_size)
    _add_channels(writer, config, config.mamba_d_state, config.mamba_d_conv, config.mamba_dt_rank)
    if config.num_experts > 1:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)


def _add_channels(writer: gguf.GGUFWriter, config: PreTrainedConfig, state: int, taps: int, rank: int) -> None:
    writer.add_ssm_conv_kernel(taps)
    writer.add_ssm_state_size(state)
    writer.add_ssm_inner_size(2 * config.hidden_size)
    writer.add_ssm_time_step_rank(rank)


def _add_scan(writer: gguf.GGUFWriter, *, inner: int, heads: int, groups: int, state: int, taps: int) -> None:
    writer.add_ssm_conv_kernel(taps)
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_time_step_rank(heads)


def _stacked(tensors: Tensors) -> Tensors:
    """Stack the experts."""
    whole: Tensors = {}
    parts: dict[str, list[NDArray[np.float32]]] = {}
    for name, array in tensors.items():
        stack = _EXPERT.sub(".experts.", name)
        if stack == name:
            whole[name] = array
        else:
            parts.setdefault(stack, []).append(array)
    return whole | {name: np.stack(arrays) for name, arrays in parts.items()}


def _converted(config: PreTrainedConfig, tensors: Tensors) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield the tensors of a file, still under the names of transformers."""
    groups = next((n for key in ("n_groups", "mamba_n_groups") if (n := getattr(config, key, None))), 1)
    for name, array in tensors.items():
        if config.model_type == "falcon_h1" and not name.endswith("conv1d.weight"):
            array = array * _factors(config, name)
        if name.endswith("A_log"):
            yield name, -np.exp(array if array.ndim > 1 else array[:, None])
        elif name.endswith(".D") and config.model_type in ("mamba", "falcon_mamba", "jamba"):
            yield name, array
        elif ".feed_forward.experts." in name:
            yield name.replace("feed_forward", "mlp"), array
        elif name.endswith(".D"):
            yield name, array[:, None]
        elif name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
            yield name, array.reshape(groups, -1)
        elif name.endswith("conv1d.weight"):
            yield name, array[:, 0]
        elif name.endswith("dt_bias"):
            yield name.replace("dt_bias", "dt_proj.bias"), array
        elif ".mixer.experts." in name:
            yield name.replace("backbone.", "model.").replace(".mixer.", ".mlp."), array
        else:
            yield name.replace("e_score_correction_bias", "e_score_correction.bias"), array


def _factors(config: PreTrainedConfig, name: str) -> NDArray[np.float32]:
    """Return the factors of Falcon's rows, which its converter multiplies into the weights."""
    part = name.split(".")[-2]
    key = config.key_multiplier * config.attention_in_multiplier
    factors = {
        "embed_tokens": config.embedding_multiplier,
        "lm_head": config.lm_head_multiplier,
        "q_proj": config.attention_in_multiplier,
        "k_proj": key,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "gate_proj": config.mlp_multipliers[0],
        "down_proj": config.mlp_multipliers[1],
        "out_proj": config.ssm_out_multiplier,
    }
    if part != "in_proj":
        return np.float32(factors.get(part, 1.0))
    inner = config.mamba_d_ssm or config.mamba_expand * config.hidden_size
    groups = config.mamba_n_groups * config.mamba_d_state
    rows = np.repeat(config.ssm_multipliers, (inner, inner, groups, groups, config.mamba_n_heads))
    return (config.ssm_in_multiplier * rows)[:, None].astype(np.float32)
