"""Tiny random models of additional families, and how GGUF converters change them."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
from numpy.typing import NDArray
from transformers import (
    ApertusConfig,
    ArceeConfig,
    AutoConfig,
    BitNetConfig,
    CohereConfig,
    DeepseekV32Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    GlmConfig,
    GlmMoeDsaConfig,
    GraniteMoeConfig,
    GraniteMoeSharedConfig,
    HeliumConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    Lfm2MoeConfig,
    LongcatFlashConfig,
    MiMoV2FlashConfig,
    MiniCPM3Config,
    MiniMaxM2Config,
    OlmoConfig,
    OlmoeConfig,
    PhimoeConfig,
    PreTrainedConfig,
    SeedOssConfig,
)

from tests.support import tiny_step
from tests.support.tiny_sizes import SIZES, llama3_rope, rope

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_GRANITE = {
    **SIZES,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.15,
    "logits_scaling": 2.0,
}
_ERNIE = {**SIZES, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_end_index": 2}
_DOTS = {**SIZES, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_LFM = {**SIZES, "layer_types": ["conv", "full_attention", "conv"], "moe_intermediate_size": 32, **_EXPERTS}
_LING = {
    **SIZES,
    "head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "seed-oss": lambda: SeedOssConfig(**SIZES, head_dim=32),
    "seed-oss-biased": lambda: SeedOssConfig(
        **SIZES, head_dim=16, attention_bias=False, attention_out_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "arcee": lambda: ArceeConfig(**SIZES, rope_parameters=rope("yarn", factor=4.0)),
    "arcee-biased": lambda: ArceeConfig(**SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "bitnet": lambda: BitNetConfig(**SIZES, attention_bias=True, tie_word_embeddings=True),
    "bitnet-silu": lambda: BitNetConfig(**SIZES, hidden_act="silu", tie_word_embeddings=True),
    "ernie4-5": lambda: Ernie4_5Config(**SIZES, head_dim=32),
    "ernie4-5-biased": lambda: Ernie4_5Config(**SIZES, head_dim=16, use_bias=True, tie_word_embeddings=False),
    "ernie4-5-moe": lambda: Ernie4_5_MoeConfig(**_ERNIE, moe_num_shared_experts=2, moe_layer_start_index=1),
    "ernie4-5-moe-mixed": lambda: Ernie4_5_MoeConfig(
        **_ERNIE, moe_num_shared_experts=0, moe_layer_start_index=0, moe_layer_interval=2, tie_word_embeddings=False
    ),
    "hunyuan-dense": lambda: HunYuanDenseV1Config(**SIZES, head_dim=32, attention_bias=True),
    "hunyuan-dense-alpha": lambda: HunYuanDenseV1Config(
        **SIZES, head_dim=16, tie_word_embeddings=True, rope_parameters=rope("dynamic", alpha=50.0, factor=1.0)
    ),
    "hunyuan-moe": lambda: HunYuanMoEV1Config(**SIZES, head_dim=16, num_experts=4, moe_topk=2),
    "minimax-m2": lambda: MiniMaxM2Config(
        **SIZES,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    ),
    "olmoe": lambda: OlmoeConfig(**SIZES, **_EXPERTS),
    "olmoe-clipped": lambda: OlmoeConfig(**SIZES, **_EXPERTS, clip_qkv=0.3, norm_topk_prob=True),
    "granitemoe": lambda: GraniteMoeConfig(**_GRANITE, tie_word_embeddings=True),
    "granitemoe-shared": lambda: GraniteMoeSharedConfig(**_GRANITE, shared_intermediate_size=48, attention_bias=True),
    "dots1": lambda: Dots1Config(
        **_DOTS, n_shared_experts=2, first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=2.5
    ),
    "dots1-groups": lambda: Dots1Config(
        **_DOTS, n_group=4, topk_group=2, n_shared_experts=1, sliding_window=5, max_window_layers=1, attention_bias=True
    ),
    "lfm2moe": lambda: Lfm2MoeConfig(**_LFM, num_dense_layers=1, routed_scaling_factor=1.5),
    "lfm2moe-plain": lambda: Lfm2MoeConfig(
        **_LFM, num_dense_layers=0, use_expert_bias=False, norm_topk_prob=False, conv_bias=True
    ),
    "cohere": lambda: CohereConfig(**SIZES, logit_scale=0.25),
    "cohere-normed": lambda: CohereConfig(**SIZES, use_qk_norm=True, attention_bias=True),
    "cohere-untied": lambda: CohereConfig(**SIZES, logit_scale=0.25, tie_word_embeddings=False),
    "glm": lambda: GlmConfig(**SIZES, head_dim=16),
    "glm-unbiased": lambda: GlmConfig(**SIZES, head_dim=32, attention_bias=False, tie_word_embeddings=True),
    "exaone": lambda: AutoConfig.for_model("exaone", **SIZES),
    "internlm3": lambda: AutoConfig.for_model("internlm3", **SIZES, head_dim=32, attention_bias=True, mlp_bias=True),
}

_LATENT = {
    **SIZES,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_MIMO = {
    **SIZES,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}
_LONGCAT = {
    **{key: value for key, value in _LATENT.items() if key not in ("num_hidden_layers", "intermediate_size")},
    "num_layers": 2,
    "ffn_hidden_size": 96,
    "head_dim": 8,
    "n_routed_experts": 4,
    "moe_topk": 3,
    "expert_ffn_hidden_size": 32,
}
_INDEXED = {
    **_LATENT,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 40,
}

CONFIGS |= {
    "deepseek32": lambda: DeepseekV32Config(**_INDEXED, n_group=4, topk_group=2),
    "glm-dsa": lambda: GlmMoeDsaConfig(**_INDEXED, indexer_types=["full", "shared", "full"]),
    "longcat-flash": lambda: LongcatFlashConfig(**_LONGCAT, zero_expert_num=3),
    "longcat-flash-yarn": lambda: LongcatFlashConfig(
        **_LONGCAT,
        zero_expert_num=0,
        routed_scaling_factor=1.5,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters=rope("yarn", factor=4.0, mscale=0.8, mscale_all_dim=0.7),
    ),
    "minicpm3": lambda: MiniCPM3Config(**_LATENT),  # the multipliers of the published model, which GGUF files take
    "minicpm3-long": lambda: MiniCPM3Config(
        **{**_LATENT, "q_lora_rank": None},
        tie_word_embeddings=False,
        scale_emb=3.0,
        scale_depth=0.8,
        dim_model_base=32,
        rope_parameters={
            **rope("longrope"),
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 1.5, 2.0, 3.0],
        },
    ),
    "mimo-v2-flash": lambda: MiMoV2FlashConfig(
        **_MIMO,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        sliding_window=6,
        n_group=1,
        topk_group=1,
    ),
    "mimo-v2-flash-groups": lambda: MiMoV2FlashConfig(
        **_MIMO,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"],
        sliding_window=9,
        n_group=4,
        topk_group=2,
        attention_bias=True,
        attention_value_scale=None,
        norm_topk_prob=False,
        routed_scaling_factor=2.0,
        tie_word_embeddings=True,
    ),
    "step35": tiny_step.limited,
    "step35-plain": tiny_step.plain,
    "apertus": lambda: ApertusConfig(**SIZES, rope_parameters=llama3_rope()),
    "apertus-biased": lambda: ApertusConfig(
        **SIZES,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    ),
    "phimoe": lambda: PhimoeConfig(**SIZES, num_local_experts=8, attention_bias=True, lm_head_bias=True),
    "phimoe-long": lambda: PhimoeConfig(
        **SIZES,
        num_local_experts=4,
        router_jitter_noise=0.03,
        sliding_window=9,
        rope_parameters={
            **rope("longrope"),
            # transformers takes the short factors of this family whatever the length is; its authors do not.
            "short_factor": [1.0 + i for i in range(8)],
            "long_factor": [1.0 + i for i in range(8)],
            "short_mscale": 1.2,
            "long_mscale": 1.2,
        },
    ),
    "olmo": lambda: OlmoConfig(**SIZES),
    "olmo-clipped": lambda: OlmoConfig(**SIZES, clip_qkv=0.3, tie_word_embeddings=True, attention_bias=True),
    "helium": lambda: HeliumConfig(**SIZES, head_dim=16),
    "bailingmoe2": lambda: AutoConfig.for_model("sarvam_moe", **_LING, n_group=4, topk_group=2, use_qk_norm=True),
}

# GGUF files have no place for what makes these special.
WITHOUT_GGUF = {"phimoe-long", "mimo-v2-flash-groups", "step35-plain"}
WITHOUT_GGUF |= {
    "longcat-flash",
    "longcat-flash-yarn",
    "deepseek32",
    "minicpm3-long",
    "helium",
    "cohere-untied",
    "ernie4-5-moe-mixed",
    "dots1-groups",
    "lfm2moe-plain",
}
# model_type -> name in GGUF files, if they differ.
GGUF_NAMES = {
    "ernie4_5_moe": "ernie4_5-moe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "minimax_m2": "minimax-m2",
    "granitemoeshared": "granitemoe",
    "lfm2_moe": "lfm2moe",
    "cohere": "command-r",
    "glm": "chatglm",
    "internlm3": "llama",
    "glm_moe_dsa": "glm-dsa",
    "mimo_v2_flash": "mimo2",
    "step3p5": "step35",
    "sarvam_moe": "bailingmoe2",
    "bitnet": "bitnet-b1.58",
}
PERMUTED = ("arcee", "olmo", "granitemoe")

Tensors = dict[str, NDArray[np.float32]]


def converted(config: PreTrainedConfig, tensors: Tensors) -> Tensors:
    """Return the tensors of a file, still under the names of transformers."""
    out: Tensors = {}
    for name, array in tensors.items():
        if ".act_fn." in name:
            continue
        if config.model_type == "glm" and name.split(".")[-2] in ("q_proj", "k_proj", "v_proj"):
            parts = [tensors[name.replace(name.split(".")[-2], f"{part}_proj")] for part in "qkv"]
            out[name.replace(name.split(".")[-2], "qkv_proj")] = np.concatenate(parts)
        elif name.endswith(".input_linear.weight") and config.model_type.startswith("granitemoe"):
            stem, gate_up = name.removesuffix("input_linear.weight"), np.split(array, 2, axis=-2)
            for part, half in zip(("gate", "up"), gate_up, strict=True):
                kind = f"{part}_proj" if "shared_mlp" in name else f"experts.{part}_proj"
                out[f"{stem}{kind}.weight".replace("block_sparse_moe", "mlp")] = half
        elif ".experts.w" in name:
            part = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}[name.split(".")[-2]]
            stem = name.rpartition(".experts.")[0].replace("block_sparse_moe", "mlp").replace("feed_forward", "mlp")
            out[f"{stem}.experts.{part}.weight"] = array
        elif name.endswith(("self_attn.sinks", "self_attn.attention_sink_bias")):
            out[f"{name.rpartition('.')[0]}.sinks.weight"] = array
        elif name.endswith("shared_mlp.output_linear.weight"):
            out[name.replace("output_linear", "down_proj")] = array
        elif name.endswith("moe.router_bias"):
            out[f"{name}.bias"] = array
        elif name.endswith(("e_score_correction.bias", "expert_bias")):
            out[name.replace("expert_bias", "e_score_correction.bias")] = array.reshape(-1)
        else:
            out[name] = array
    return out


_NAMES = {
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.attn_sub_norm": "attn_sub_norm",
    "mlp.ffn_sub_norm": "ffn_sub_norm",
    "shared_mlp.gate_proj": "ffn_gate_shexp",
    "shared_mlp.up_proj": "ffn_up_shexp",
    "shared_mlp.down_proj": "ffn_down_shexp",
    "e_score_correction": "exp_probs_b",
    "feed_forward.gate": "ffn_gate_inp",
}


def gguf_name(name: str) -> str | None:
    """Return a name that the tensor map of the gguf package lacks because the converter writes it itself."""
    stem, _, kind = name.rpartition(".")
    part = next((new for old, new in _NAMES.items() if stem.endswith(old)), None)
    return None if part is None else f"blk.{stem.split('.')[2]}.{part}.{kind}"


def add_constants(writer: gguf.GGUFWriter, architecture: str, tensors: Tensors) -> None:
    """Add the slopes of xIELU, which are not tensors in GGUF files."""
    parts = ("alpha_p", "alpha_n", "beta", "eps") if architecture == "apertus" else ()
    for part in parts:
        values = [array for name, array in sorted(tensors.items()) if name.endswith(f".act_fn.{part}")]
        writer.add_array(f"xielu.{part}", [float(array.reshape(-1)[0]) for array in values])


def add_metadata(writer: gguf.GGUFWriter, architecture: str, config: PreTrainedConfig) -> None:
    """Add the keys that differ from those of other decoders."""
    if architecture == "hunyuan-dense" and config.rope_parameters.get("alpha"):
        stretch = config.rope_parameters["alpha"] ** (config.head_dim / (config.head_dim - 2))
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"] * stretch)
    if architecture == "hunyuan-moe":
        writer.add_expert_used_count(config.moe_topk)
        writer.add_expert_shared_feed_forward_length(config.intermediate_size)
    if architecture == "glm-dsa":
        writer.add_indexer_top_k(config.index_topk)
        writer.add_indexer_head_count(config.index_n_heads)
        writer.add_indexer_key_length(config.index_head_dim)
    if architecture == "mimo2":
        local = [kind == "sliding_attention" for kind in config.layer_types]
        writer.add_head_count_kv([2 if is_local else 1 for is_local in local])
        writer.add_value_length(config.v_head_dim)
        writer.add_sliding_window_pattern(local)
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
        writer.add_rope_dimension_count(8)  # of 24, the published share
        writer.add_float32("mimo2.attention.value_scale", config.attention_value_scale)
    if architecture == "step35":
        tiny_step.add_metadata(writer, config)
    if architecture == "minimax-m2":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if architecture == "ernie4_5-moe":
        writer.add_expert_count(config.moe_num_experts)
        writer.add_expert_used_count(config.moe_k)
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_expert_shared_count(config.moe_num_shared_experts)
    if architecture == "granitemoe" and hasattr(config, "shared_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if architecture == "lfm2moe":
        kinds = [0 if kind == "conv" else config.num_key_value_heads for kind in config.layer_types]
        writer.add_head_count_kv(kinds)
        writer.add_shortconv_l_cache(config.conv_L_cache)
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
    if getattr(config, "clip_qkv", None):
        writer.add_clamp_kqv(config.clip_qkv)
    if getattr(config, "norm_topk_prob", None) is not None and architecture == "olmoe":
        writer.add_expert_weights_norm(config.norm_topk_prob)
