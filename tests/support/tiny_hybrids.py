"""Tiny random models with states, and how GGUF converters change their tensors and metadata."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import gguf
import numpy as np
from numpy.typing import NDArray
from transformers import (
    GraniteMoeHybridConfig,
    Lfm2Config,
    PreTrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from tests.support.tiny_sizes import SIZES

_SIZES = {**SIZES, "num_hidden_layers": 4}

_DELTA = {
    **_SIZES,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "full_attention_interval": 2,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}

_MAMBA = {
    **_SIZES,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "shared_intermediate_size": 48,
    "mamba_n_heads": 8,
    "mamba_d_head": "auto",
    "mamba_d_state": 24,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.15,
    "logits_scaling": 2.0,
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
    "qwen3next": lambda: Qwen3NextConfig(**_DELTA, **_EXPERTS),
    "qwen3next-mixed": lambda: Qwen3NextConfig(
        **_DELTA, **_EXPERTS, mlp_only_layers=[1], norm_topk_prob=False, attention_bias=True, linear_conv_kernel_dim=3
    ),
    "granitehybrid": lambda: GraniteMoeHybridConfig(**_MAMBA, num_local_experts=4, num_experts_per_tok=2),
    "granitehybrid-dense": lambda: GraniteMoeHybridConfig(**_MAMBA, num_local_experts=0, tie_word_embeddings=True),
    "granitehybrid-groups": lambda: GraniteMoeHybridConfig(**_MAMBA, num_local_experts=0, mamba_n_groups=2),
    "granitehybrid-rope": lambda: GraniteMoeHybridConfig(
        **_MAMBA,
        num_local_experts=0,
        position_embedding_type="rope",
        attention_bias=True,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        mamba_d_conv=3,
    ),
    "qwen35": lambda: Qwen3_5TextConfig(**_DELTA, tie_word_embeddings=True),
    "qwen35moe": lambda: Qwen3_5MoeTextConfig(**_DELTA, **_EXPERTS),
}

# Of each family, for the engine.
HYBRIDS = ["lfm2", "qwen35", "granitehybrid-dense"]

# GGUF files have no place for what makes these special.
WITHOUT_GGUF = {"lfm2-biased", "qwen3next-mixed"}

Tensors = dict[str, NDArray[np.float32]]


def converted(architecture: str, config: PreTrainedConfig, tensors: Tensors) -> Tensors:
    """Return the tensors of a file, still under the names of transformers."""
    if architecture in ("qwen3next", "qwen35", "qwen35moe"):
        return {name: array for n, a in tensors.items() for name, array in _delta_tensors(architecture, config, n, a)}
    if architecture == "granitehybrid":
        return {name: array for n, a in tensors.items() for name, array in _mamba_tensors(config, n, a)}
    return {n: a.reshape(a.shape[0], a.shape[2]) if n.endswith("conv.conv.weight") else a for n, a in tensors.items()}


def _mamba_tensors(
    config: PreTrainedConfig, name: str, array: NDArray[np.float32]
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    if name.endswith("A_log"):
        array = -np.exp(array)
    if name.endswith(("A_log", ".D")):
        array = array[:, None]
    elif name.endswith("mamba.norm.weight"):
        array = array.reshape(config.mamba_n_groups, -1)
    elif name.endswith("conv1d.weight"):
        array = array[:, 0]
    elif name.endswith("dt_bias"):
        name = name.replace("dt_bias", "dt_proj.bias")
    kind = "mlp.{}_proj" if config.num_local_experts == 0 else "mlp.shared_expert.{}_proj"
    for stem, parts in (("shared_mlp", kind), ("block_sparse_moe", "mlp.experts.{}_proj")):
        if name.endswith(f"{stem}.input_linear.weight"):
            gate, up = np.split(array, 2, axis=-2)
            yield name.replace(f"{stem}.input_linear", parts.format("gate")), gate
            yield name.replace(f"{stem}.input_linear", parts.format("up")), up
            return
        name = name.replace(f"{stem}.output_linear", parts.format("down"))
    yield name, array


def _delta_tensors(
    architecture: str, config: PreTrainedConfig, name: str, array: NDArray[np.float32]
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    heads, share = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    if name.endswith("A_log"):
        array = -np.exp(array)
    elif name.endswith("dt_bias"):
        name = name.replace("dt_bias", "dt_proj.bias")
    elif name.endswith("conv1d.weight"):
        array = array[:, 0]
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        array = array + 1
    if name.endswith("in_proj_qkvz.weight"):
        parts = array.reshape(heads, -1, array.shape[1])
        borders = np.cumsum([key_dim, key_dim, share * value_dim])
        q, k, v, z = (part.reshape(-1, array.shape[1]) for part in np.split(parts, borders, axis=1))
        yield name.replace("in_proj_qkvz", "in_proj_qkv"), np.concatenate([q, k, v])
        yield name.replace("in_proj_qkvz", "in_proj_z"), z
        return
    if architecture != "qwen3next":
        array = _tiled_values(name, array, (heads, share, value_dim), 2 * heads * key_dim)
    yield name, array


def _tiled_values(
    name: str, array: NDArray[np.float32], sizes: tuple[int, int, int], first: int
) -> NDArray[np.float32]:
    """Reorder value heads as ggml repeats key heads: the first of each key head, then the second of each."""
    heads, share, dim = sizes
    order = np.arange(heads * share).reshape(heads, share).T.reshape(-1)
    columns = (order[:, None] * dim + np.arange(dim)).reshape(-1)
    if name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_proj.bias")):
        return array[order]
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        return np.concatenate([array[:first], array[first:][columns]])
    if name.endswith("in_proj_z.weight"):
        return array[columns]
    return array[:, columns] if name.endswith("linear_attn.out_proj.weight") else array


def add_metadata(writer: gguf.GGUFWriter, architecture: str, config: PreTrainedConfig) -> None:
    if architecture == "lfm2":
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_shortconv_l_cache(config.conv_L_cache)
        writer.add_feed_forward_length(-(-2 * config.intermediate_size // 3 // 256) * 256)
        heads = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]
        writer.add_head_count_kv(heads)
    if architecture == "granitehybrid":
        if config.num_local_experts == 0:
            writer.add_feed_forward_length(config.shared_intermediate_size)
        else:
            writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_group_count(config.mamba_n_groups)
        writer.add_ssm_inner_size(config.mamba_n_heads * config.mamba_d_head)
        writer.add_ssm_time_step_rank(config.mamba_n_heads)
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
        writer.add_head_count_kv([config.num_key_value_heads if "full" in kind else 0 for kind in config.layer_types])
    if architecture in ("qwen3next", "qwen35", "qwen35moe"):
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        writer.add_full_attention_interval(2)
