"""Tiny random models of Llama 4, Gemma 3n and Gemma 4, and how GGUF converters change them."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from transformers import Gemma3nTextConfig, Gemma4TextConfig, Llama4TextConfig, PreTrainedConfig

from tests.support.tiny_sizes import SIZES, llama3_rope

_SIZES = {**SIZES, "num_hidden_layers": 4}
_LLAMA4 = {**_SIZES, "head_dim": 16, "intermediate_size": 48, "intermediate_size_mlp": 80, "num_local_experts": 4}

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama4": lambda: Llama4TextConfig(**_LLAMA4, interleave_moe_layer_step=2, rope_parameters=llama3_rope()),
    "llama4-short": lambda: Llama4TextConfig(
        **_LLAMA4,
        attention_chunk_size=7,
        floor_scale=16,
        attn_scale=0.5,
        num_experts_per_tok=2,
        no_rope_layers=[1, 0, 1, 1],
        moe_layers=[1, 2],
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "llama4-plain": lambda: Llama4TextConfig(
        **_LLAMA4, attention_chunk_size=16, use_qk_norm=False, attn_temperature_tuning=False
    ),
}

_KINDS = ["sliding_attention", "full_attention"]
_GEMMA: dict[str, Any] = {
    **_SIZES,
    "head_dim": 16,
    "num_hidden_layers": 6,
    "sliding_window": 5,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 8,
}
_GEMMA4: dict[str, Any] = {**_GEMMA, "global_head_dim": 32}

CONFIGS |= {
    "gemma3n": lambda: Gemma3nTextConfig(
        **_GEMMA,
        laurel_rank=8,
        layer_types=_KINDS * 3,
        num_kv_shared_layers=2,
        activation_sparsity_pattern=[0.95, 0.5, 0.0, 0.0, 0.0, 0.0],
    ),
    "gemma3n-special": lambda: Gemma3nTextConfig(
        **{**_GEMMA, "vocab_size_per_layer_input": 60, "intermediate_size": [96, 64, 96, 96, 96, 96]},
        laurel_rank=4,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", *_KINDS, "sliding_attention"],
        num_kv_shared_layers=3,
        altup_num_inputs=3,
        altup_active_idx=1,
        altup_correct_scale=False,
        attention_bias=True,
        tie_word_embeddings=False,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "gemma4": lambda: Gemma4TextConfig(
        **_GEMMA4,
        layer_types=_KINDS * 3,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        final_logit_softcapping=10.0,
    ),
    "gemma4-few-keys": lambda: Gemma4TextConfig(
        **{**_GEMMA4, "hidden_size_per_layer_input": 0, "num_hidden_layers": 3},
        layer_types=[*_KINDS, "full_attention"],
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
    ),
    "gemma4-experts": lambda: Gemma4TextConfig(
        **_GEMMA4,
        layer_types=_KINDS * 3,
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=2,
        moe_intermediate_size=24,
    ),
    "gemma4-biased": lambda: Gemma4TextConfig(
        **{**_GEMMA4, "num_hidden_layers": 7},
        attention_bias=True,
        tie_word_embeddings=False,
        rope_parameters={
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.5,
                "rope_theta": 1e5,
                "factor": 2.0,
            },
            "sliding_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        },
    ),
}

# GGUF files have no place for what makes these special.
WITHOUT_GGUF = {"llama4-short", "llama4-plain", "gemma3n-special", "gemma4-biased"}

ARCHITECTURES = ("llama4", "gemma3n", "gemma4")

Tensors = dict[str, NDArray[np.float32]]


def converted(architecture: str, config: PreTrainedConfig, tensors: Tensors) -> Tensors:
    """Return the tensors of a file, still under the names of transformers."""
    return {"llama4": _llama4, "gemma3n": _gemma3n, "gemma4": _gemma4}[architecture](config, tensors)


def _gemma3n(config: PreTrainedConfig, tensors: Tensors) -> Tensors:
    out: Tensors = {}
    for name, array in tensors.items():
        stem, _, number = name.removesuffix(".weight").rpartition(".")
        if number.isdecimal():
            if number == "0":
                parts = [tensors[f"{stem}.{i}.weight"] for i in range(config.altup_num_inputs - 1)]
                out[f"{stem}.weight"] = np.stack(parts)
        else:
            out[name + (".weight" if name.endswith("_scale") else "")] = array
    return out


def _gemma4(config: PreTrainedConfig, tensors: Tensors) -> Tensors:  # noqa: ARG001
    out: Tensors = {}
    for name, array in tensors.items():
        has_no_kind = name.endswith("layer_scalar") or ".experts." in name
        out[name + (".weight" if has_no_kind else "")] = array
    return out


def gguf_name(name: str) -> str | None:
    """Return a name that the tensor map of the gguf package lacks because the converter writes it itself."""
    layer = name.split(".")[-3] if name.endswith(("router.scale", "router.per_expert_scale")) else None
    if layer is None:
        return None
    return f"blk.{layer}.ffn_{'gate_inp' if name.endswith('router.scale') else 'down_exps'}.scale"


def _llama4(config: PreTrainedConfig, tensors: Tensors) -> Tensors:  # noqa: ARG001
    out: Tensors = {}
    for name, array in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = np.split(array.swapaxes(1, 2), 2, axis=1)
            stem = name.removesuffix("gate_up_proj")
            out |= {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            out[name + ".weight"] = array.swapaxes(1, 2)
        else:
            out[name] = array
    return out


def add_metadata(writer: gguf.GGUFWriter, architecture: str, config: PreTrainedConfig) -> None:
    if architecture == "llama4":
        writer.add_feed_forward_length(config.intermediate_size_mlp)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    if architecture in ("gemma3n", "gemma4"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        writer.add_shared_kv_layers(config.num_kv_shared_layers)
        writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if architecture == "gemma3n":
        writer.add_altup_active_idx(config.altup_active_idx)
        writer.add_altup_num_inputs(config.altup_num_inputs)
        shares = config.activation_sparsity_pattern
        writer.add_activation_sparsity_scale([NormalDist().inv_cdf(s) if s else -math.inf for s in shares])
    if architecture == "gemma4":
        _add_gemma4(writer, config)


def _add_gemma4(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    local = [kind == "sliding_attention" for kind in config.layer_types]
    full = config.per_layer_config[local.index(False)]
    writer.add_key_length(full.head_dim)
    writer.add_value_length(full.head_dim)
    writer.add_key_length_swa(config.head_dim)
    writer.add_value_length_swa(config.head_dim)
    writer.add_rope_dimension_count(full.head_dim)
    writer.add_rope_dimension_count_swa(config.head_dim)
    writer.add_head_count_kv(
        [config.num_key_value_heads if is_local else full.num_key_value_heads for is_local in local]
    )
    if getattr(config, "enable_moe_block", False):
        writer.add_expert_used_count(config.top_k_experts)
    if getattr(config, "use_double_wide_mlp", False):
        first = config.num_hidden_layers - config.num_kv_shared_layers
        widths = [config.intermediate_size * (1 if i < first else 2) for i in range(config.num_hidden_layers)]
        writer.add_feed_forward_length(widths)
    rotated = int(full.head_dim * config.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
    writer.add_tensor(
        "rope_freqs.weight", np.array([1.0] * rotated + [1e30] * (full.head_dim // 2 - rotated), np.float32)
    )
