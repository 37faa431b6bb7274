"""Tiny random models of Llama 4, and what converters to GGUF make of them."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
from numpy.typing import NDArray
from transformers import Llama4TextConfig, PreTrainedConfig

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_LLAMA4 = {**_SIZES, "head_dim": 16, "intermediate_size": 48, "intermediate_size_mlp": 80, "num_local_experts": 4}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 16,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama4": lambda: Llama4TextConfig(**_LLAMA4, interleave_moe_layer_step=2, rope_parameters=_LLAMA3_ROPE),
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

# GGUF files have no place for what makes these special.
WITHOUT_GGUF = {"llama4-short", "llama4-plain"}

ARCHITECTURES = ("llama4",)

Tensors = dict[str, NDArray[np.float32]]


def converted(architecture: str, config: PreTrainedConfig, tensors: Tensors) -> Tensors:  # noqa: ARG001
    """The tensors of a file, still under the names of transformers."""
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
