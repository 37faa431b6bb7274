"""Tiny random models of the architectures over `octavo.models._classic`, and their GGUF files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray
from transformers import (
    BloomConfig,
    FalconConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoConfig,
    GPTNeoXConfig,
    MptConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

_IDS = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
_SIZES = {**_IDS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128}
_GPT = {**_IDS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
_NEO = {**_IDS, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 128}
_BLOOM = {**_IDS, "n_layer": 2, "seq_length": 128}
_MPT = {**_IDS, "n_layers": 2, "max_seq_len": 128}


def _rope(share: float) -> dict[str, object]:
    return {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": share}


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gpt2": lambda: GPT2Config(**_GPT),
    "gpt2-scales": lambda: GPT2Config(
        **_GPT,
        n_inner=96,
        activation_function="gelu",
        scale_attn_weights=False,
        scale_attn_by_inverse_layer_idx=True,
        tie_word_embeddings=False,
    ),
    "gpt-neox": lambda: GPTNeoXConfig(**_SIZES, intermediate_size=96, rope_parameters=_rope(0.25)),
    "gpt-neox-sequential": lambda: GPTNeoXConfig(
        **_SIZES,
        intermediate_size=96,
        rope_parameters=_rope(0.5),
        use_parallel_residual=False,
        attention_bias=False,
        tie_word_embeddings=True,
    ),
    "phi": lambda: PhiConfig(**_SIZES, intermediate_size=96, num_key_value_heads=2, rope_parameters=_rope(0.5)),
    "phi-tied": lambda: PhiConfig(
        **_SIZES, intermediate_size=96, tie_word_embeddings=True, hidden_act="relu", rope_parameters=_rope(0.25)
    ),
    "gpt-neo": lambda: GPTNeoConfig(**_NEO, attention_types=[[["global", "local"], 1]], window_size=5),
    "gpt-neo-local": lambda: GPTNeoConfig(
        **_NEO, attention_types=[[["local"], 2]], window_size=7, tie_word_embeddings=False, intermediate_size=96
    ),
    "gpt-bigcode": lambda: GPTBigCodeConfig(**_GPT),
    "gpt-bigcode-heads": lambda: GPTBigCodeConfig(
        **_GPT,
        n_inner=96,
        multi_query=False,
        scale_attn_weights=False,
        activation_function="gelu",
        tie_word_embeddings=False,
    ),
    "opt": lambda: OPTConfig(**_SIZES, ffn_dim=96),
    "opt-post-norm": lambda: OPTConfig(
        **_SIZES,
        ffn_dim=96,
        word_embed_proj_dim=32,
        do_layer_norm_before=False,
        activation_function="gelu",
        enable_bias=False,
    ),
    "falcon": lambda: FalconConfig(**_SIZES),
    "falcon-grouped": lambda: FalconConfig(
        **_SIZES, ffn_hidden_size=96, new_decoder_architecture=True, num_kv_heads=2, tie_word_embeddings=False
    ),
    "falcon-one-norm": lambda: FalconConfig(
        **_SIZES, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1
    ),
    "falcon-alibi": lambda: FalconConfig(**_SIZES, alibi=True, multi_query=False, parallel_attn=False, bias=True),
    "bloom": lambda: BloomConfig(**_BLOOM, hidden_size=96, n_head=6),
    "bloom-normed-residual": lambda: BloomConfig(
        **_BLOOM, hidden_size=64, n_head=4, apply_residual_connection_post_layernorm=True
    ),
    "mpt": lambda: MptConfig(**_MPT, d_model=64, n_heads=4, attn_config={"softmax_scale": 0.2}),
    "mpt-clipped": lambda: MptConfig(**_MPT, d_model=96, n_heads=6, attn_config={"clip_qkv": 0.5}),
    "gptj": lambda: GPTJConfig(**_GPT, n_inner=96, rotary_dim=8),
}

# GGUF files of these architectures have no place for what makes the configuration special, or do not exist.
WITHOUT_GGUF = frozenset(
    {"gpt2-scales", "opt", "opt-post-norm", "falcon-alibi", "bloom-normed-residual", "mpt", "gptj", "phi-tied"}
    | {"gpt-neo", "gpt-neo-local", "gpt-bigcode-heads"}
)

# By model type.
GGUF_ARCHITECTURES = {
    "gpt2": gguf.MODEL_ARCH.GPT2,
    "gpt_neox": gguf.MODEL_ARCH.GPTNEOX,
    "gpt_bigcode": gguf.MODEL_ARCH.STARCODER,
    "phi": gguf.MODEL_ARCH.PHI2,
    "falcon": gguf.MODEL_ARCH.FALCON,
    "bloom": gguf.MODEL_ARCH.BLOOM,
    "mpt": gguf.MODEL_ARCH.MPT,
}


def save_gguf(model: PreTrainedModel, path: Path) -> Path:
    """Write the model as llama.cpp's converter does, under the names of the gguf package, every tensor as F32."""
    config = model.config
    architecture = GGUF_ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _add_metadata(writer, config)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            hf_name = name.removeprefix("transformer.") if config.model_type == "bloom" else name
            gguf_name = names.get_name(hf_name, (".weight", ".bias"))
            assert gguf_name is not None, name
            writer.add_tensor(gguf_name, np.ascontiguousarray(_converted(name, tensor.numpy(), config)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _converted(name: str, array: NDArray[np.float32], config: PreTrainedConfig) -> NDArray[np.float32]:
    """Transpose Conv1D weights, and concatenate q, k and v, which the checkpoint groups by kv head."""
    if name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        return array if config.model_type == "gpt_bigcode" else array.T
    if ".query_key_value." not in name:
        return array
    heads = kv_heads = config.num_attention_heads
    if config.model_type == "falcon":
        kv_heads = config.num_kv_heads if config.new_decoder_architecture else 1
    groups = array.reshape(kv_heads, heads // kv_heads + 2, -1, *array.shape[1:])
    parts = (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])
    return np.concatenate([part.reshape(-1, *array.shape[1:]) for part in parts])


def _add_metadata(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    kind = config.model_type
    heads = config.num_attention_heads
    positions = {"mpt": "max_seq_len", "bloom": "seq_length"}.get(kind, "max_position_embeddings")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(getattr(config, positions))
    writer.add_embedding_length(config.hidden_size)
    widths = [getattr(config, key, None) for key in ("n_inner", "intermediate_size", "ffn_hidden_size")]
    writer.add_feed_forward_length(next((width for width in widths if width), 4 * config.hidden_size))
    writer.add_head_count(heads)
    writer.add_layer_norm_eps(getattr(config, "layer_norm_epsilon", None) or config.layer_norm_eps)
    if kind == "falcon":
        writer.add_head_count_kv(config.num_kv_heads if config.new_decoder_architecture else 1)
    elif kind == "gpt_bigcode":
        writer.add_head_count_kv(1)
    elif kind == "phi":
        writer.add_head_count_kv(config.num_key_value_heads)
    if kind in ("gpt_neox", "phi"):
        rope = config.rope_parameters
        writer.add_rope_dimension_count(int(rope["partial_rotary_factor"] * (config.hidden_size // heads)))
        writer.add_rope_freq_base(rope["rope_theta"])
    if kind == "gpt_neox":
        writer.add_parallel_residual(config.use_parallel_residual)
    if kind == "mpt":
        writer.add_max_alibi_bias(config.attn_config.alibi_bias_max)
        writer.add_clamp_kqv(config.attn_config.clip_qkv)
