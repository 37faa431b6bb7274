"""Tiny models written as GGUF in the way of llama.cpp's converter, with the tensor names of the gguf package."""

from __future__ import annotations

import math
import re
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedConfig, PreTrainedModel

from tests.support import tiny_classic, tiny_further, tiny_hybrids, tiny_newer, tiny_state_spaces, tiny_step
from tests.support.tiny_models import stored_tensors

_ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "ministral3": "mistral3",
    "gemma3_text": "gemma3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "granitemoehybrid": "granitehybrid",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "olmo3": "olmo2",
    "gpt_oss": "gpt-oss",
    "llama4_text": "llama4",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4",
    "glm4_moe": "glm4moe",
    "glm4_moe_lite": "deepseek2",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    **tiny_further.GGUF_NAMES,
}
_PERMUTED = ("llama", "mistral3", "granite", "smollm3", "granitehybrid", *tiny_further.PERMUTED)  # q and k in pairs
_ONE_ADDED = ("gemma", "gemma2", "gemma3", "nemotron", "step35")  # to the weights of norms
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_HEAD_NORM = re.compile(r"_layernorm\.norms\.(\d+)\.")


def save_gguf(model: PreTrainedModel, path: Path, kv_b: str = "split") -> Path:
    """Write the model as a converter does, every tensor as F32.

    kv_b: `joined` as converters before April 2025 wrote DeepSeek's, with the sizes of heads under the plain keys;
        `both` as some wrote in between.
    """
    config = model.config
    if config.model_type in tiny_classic.GGUF_ARCHITECTURES:
        return tiny_classic.save_gguf(model, path)
    if tiny_state_spaces.gguf_architecture(config) is not None:
        return tiny_state_spaces.save_gguf(config, stored_tensors(model), path)
    if config.model_type in ("gemma4_text", "gemma4_unified_text", "step3p5"):
        # Heads differ by layer; the general keys below are overwritten.
        config.allow_global_per_layer_attribute_access = True
    architecture = _ARCHITECTURES.get(config.model_type, config.model_type)
    if getattr(config, "hidden_act", None) == "silu":
        architecture = architecture.removesuffix("-b1.58")
    kv_b = "joined" if architecture == "minicpm3" else kv_b
    writer = gguf.GGUFWriter(path, architecture)
    _add_metadata(writer, config, kv_b)
    tiny_hybrids.add_metadata(writer, architecture, config)
    tiny_newer.add_metadata(writer, architecture, config)
    tiny_further.add_metadata(writer, architecture, config)
    tiny_further.add_constants(writer, architecture, stored_tensors(model))
    plain = architecture.removesuffix("-b1.58")
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == plain)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, array in _tensors(model, architecture, kv_b).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if architecture in _PERMUTED and name.split(".")[-2] in ("q_proj", "k_proj"):
            heads = config.num_attention_heads if ".q_proj" in name else config.num_key_value_heads
            array = _permute(array, heads)
        if architecture in _ONE_ADDED and name.endswith("norm.weight"):
            array = array + 1.0
        if name.endswith("shared_expert_gate.weight"):
            array = array[0]
        known = tiny_newer.gguf_name(name) or tiny_further.gguf_name(name) or names.get_name(name, (".weight", ".bias"))
        assert known is not None, name
        writer.add_tensor(known, np.ascontiguousarray(array, np.float32))
    for name, array in _rotary_tensors(config).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(model: PreTrainedModel, architecture: str, kv_b: str) -> dict[str, NDArray[np.float32]]:
    if architecture == "gpt-oss":
        return _with_gate_and_up(stored_tensors(model))
    if architecture in tiny_newer.ARCHITECTURES:
        return tiny_newer.converted(architecture, model.config, stored_tensors(model))
    tensors = _with_heads_matrices(model.config, _with_stacked_experts(stored_tensors(model)), kv_b)
    return tiny_further.converted(model.config, tiny_hybrids.converted(architecture, model.config, tensors))


def _with_stacked_experts(tensors: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    """Stack experts, and the norms of StableLM's heads."""
    whole: dict[str, NDArray[np.float32]] = {}
    parts: dict[str, list[NDArray[np.float32]]] = {}
    for name, array in tensors.items():
        stack = _HEAD_NORM.sub("_layernorm.", _EXPERT.sub(".experts.", name))
        if stack == name:
            whole[name] = array
        else:
            parts.setdefault(stack, []).append(array)
    return whole | {name: np.stack(arrays) for name, arrays in parts.items()}


def _with_gate_and_up(tensors: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    """Convert gpt-oss's experts to [out, in], and split gate and up, whose rows alternate, into separate tensors."""
    out = {}
    for name, array in tensors.items():
        kind = ".bias" if name.endswith("_proj_bias") else ".weight"
        stem = name.removesuffix("_bias")
        if not stem.endswith("_proj"):
            out[name.replace("self_attn.sinks", "self_attn.sinks.weight")] = array
            continue
        rows = array if kind == ".bias" else array.swapaxes(1, 2)
        if stem.endswith("gate_up_proj"):
            for part, begin in (("gate_proj", 0), ("up_proj", 1)):
                out[stem.replace("gate_up_proj", part) + kind] = rows[:, begin::2]
        else:
            out[stem + kind] = rows
    return out


def _with_heads_matrices(
    config: PreTrainedConfig, tensors: dict[str, NDArray[np.float32]], kv_b: str
) -> dict[str, NDArray[np.float32]]:
    """Split DeepSeek's kv_b_proj into two matrices per head, with the keys' transposed, and rename the experts'
    bias.
    """
    out = {}
    for name, array in tensors.items():
        if name.endswith("kv_b_proj.weight") and kv_b != "split":
            out[name] = array
        if name.endswith("kv_b_proj.weight") and kv_b != "joined":
            heads = array.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
            out[name.replace("kv_b_proj", "k_b_proj")] = heads[:, : config.qk_nope_head_dim].swapaxes(1, 2)
            out[name.replace("kv_b_proj", "v_b_proj")] = heads[:, config.qk_nope_head_dim :]
        elif not name.endswith("kv_b_proj.weight"):
            out[name.replace("e_score_correction_bias", "e_score_correction.bias")] = array
    return out


def _add_latent(writer: gguf.GGUFWriter, config: PreTrainedConfig, kv_b: str) -> None:
    """Add the keys of latent attention."""
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    if kv_b == "joined":
        writer.add_head_count_kv(config.num_attention_heads)
        writer.add_key_length(config.qk_nope_head_dim + config.qk_rope_head_dim)
        writer.add_value_length(config.v_head_dim)
        return
    writer.add_head_count_kv(1)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)


def _add_grouped_experts(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    """Add the keys of DeepSeek's expert routing."""
    if hasattr(config, "mlp_layer_types"):
        writer.add_leading_dense_block_count(config.mlp_layer_types.count("dense"))
    else:
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_shared_count(getattr(config, "n_shared_experts", None) or 0)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    is_v2 = config.model_type == "deepseek_v2"
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX if is_v2 else gguf.ExpertGatingFuncType.SIGMOID)
    if config.n_group is not None:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def _add_metadata(writer: gguf.GGUFWriter, config: PreTrainedConfig, kv_b: str) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if hasattr(config, "kv_lora_rank"):
        _add_latent(writer, config, kv_b)
    if hasattr(config, "n_routed_experts") and config.model_type != "step3p5":
        _add_grouped_experts(writer, config)
    if not hasattr(config, "kv_lora_rank"):
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    _add_rope(writer, config, head_dim)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
        if config.model_type in ("olmo3", "exaone4"):
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    numbers = {
        "rms_norm_eps": writer.add_layer_norm_rms_eps,
        "layer_norm_eps": writer.add_layer_norm_eps,
        "norm_epsilon": writer.add_layer_norm_eps,
        "norm_eps": writer.add_layer_norm_eps,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "attention_multiplier": writer.add_attention_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "logits_scaling": writer.add_logit_scale,
        "logit_scale": writer.add_logit_scale,
        "use_parallel_residual": writer.add_parallel_residual,
        "num_experts": writer.add_expert_count,
        "num_local_experts": writer.add_expert_count,
        "num_experts_per_tok": writer.add_expert_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
    }
    for key, write in numbers.items():
        if key in config.to_dict() and getattr(config, key) is not None:
            write(getattr(config, key))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(["t 1"])


def _add_rope(writer: gguf.GGUFWriter, config: PreTrainedConfig, head_dim: int) -> None:
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] in ("yarn", "longrope"):
        original = rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        if rope["rope_type"] == "longrope":
            factor = config.max_position_embeddings / original
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(factor) / math.log(original)))
    if hasattr(config, "kv_lora_rank") and rope.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if rope.get("llama_4_scaling_beta"):
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _rotary_tensors(config: PreTrainedConfig) -> dict[str, NDArray[np.float32]]:
    rope = config.rope_parameters
    if config.model_type == "step3p5":
        return {"rope_freqs.weight": tiny_step.rotary_factors(config)}
    if rope.get("rope_type") == "llama3":
        return {"rope_freqs.weight": _llama3_divisors(config)}
    if rope.get("rope_type") == "longrope":
        kinds = ("long", "short")
        return {f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32) for kind in kinds}
    return {}


def _permute(array: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder from halves of a head to neighbouring pairs, as converters do for llama."""
    pairs = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _llama3_divisors(config: PreTrainedConfig) -> NDArray[np.float32]:
    """Return the tensor that the converter stores: the divisor of each frequency."""
    rope = config.rope_parameters
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    divisors = []
    head_dim = config.hidden_size // config.num_attention_heads
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1.0 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)
