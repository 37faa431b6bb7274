"""Tiny random models with states, and the changes and metadata that converters to GGUF make in them."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
from numpy.typing import NDArray
from transformers import Lfm2Config, PreTrainedConfig

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

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "lfm2": lambda: Lfm2Config(**_SIZES, layer_types=["conv", "full_attention", "conv", "conv"], norm_eps=1e-5),
    "lfm2-biased": lambda: Lfm2Config(
        **_SIZES,
        full_attn_idxs=[1],
        conv_bias=True,
        conv_L_cache=4,
        tie_embedding=False,
        block_auto_adjust_ff_dim=False,
    ),
}

# Of each family, for the engine.
HYBRIDS = ["lfm2"]

# GGUF files have no place for what makes these special.
WITHOUT_GGUF = {"lfm2-biased"}

Tensors = dict[str, NDArray[np.float32]]


def converted(architecture: str, config: PreTrainedConfig, tensors: Tensors) -> Tensors:  # noqa: ARG001
    """The tensors of a file, still under the names of transformers."""
    return {n: a.reshape(a.shape[0], a.shape[2]) if n.endswith("conv.conv.weight") else a for n, a in tensors.items()}


def add_metadata(writer: gguf.GGUFWriter, architecture: str, config: PreTrainedConfig) -> None:
    if architecture == "lfm2":
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_shortconv_l_cache(config.conv_L_cache)
        heads = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]
        writer.add_head_count_kv(heads)
