"""Tiny random models of every architecture, in transformers, as safetensors and as GGUF."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    DeepseekV2Config,
    DeepseekV3Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)
from transformers.core_model_loading import revert_weight_conversion

from octavo.graph.builder import Graph
from octavo.loader.checkpoint import checkpoint_name
from octavo.loader.tensor_files import Source
from octavo.loader.transforms import transformed
from octavo.models import build_graph, load_architecture, weight_table
from octavo.models._reading import ConfigReader
from octavo.quantization.packed import DenseWeight, Weight
from tests.support import tiny_classic, tiny_further, tiny_hybrids, tiny_newer, tiny_state_spaces
from tests.support.tiny_sizes import SIZES, llama3_rope, rope

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama-tied-biased": lambda: LlamaConfig(
        **SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=32
    ),
    "llama-llama3-rope": lambda: LlamaConfig(**SIZES, rope_parameters=llama3_rope()),
    "llama-yarn": lambda: LlamaConfig(**SIZES, rope_parameters=rope("yarn", factor=4.0)),
    "llama-linear": lambda: LlamaConfig(**SIZES, rope_parameters=rope("linear", factor=2.0)),
    "mistral-window": lambda: MistralConfig(**SIZES, sliding_window=5),
    "ministral": lambda: MinistralConfig(
        **SIZES,
        head_dim=32,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "ministral3": lambda: Ministral3Config(
        **SIZES,
        head_dim=32,
        rope_parameters=rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.1,
        ),
    ),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen2-window": lambda: Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "qwen3moe": lambda: Qwen3MoeConfig(**SIZES, head_dim=32, norm_topk_prob=True, **_EXPERTS),
    "qwen3moe-mixed": lambda: Qwen3MoeConfig(
        **SIZES, head_dim=16, mlp_only_layers=[1], use_sliding_window=True, sliding_window=5, **_EXPERTS
    ),
    "qwen2moe": lambda: Qwen2MoeConfig(**SIZES, shared_expert_intermediate_size=48, **_EXPERTS),
    "qwen2moe-mixed": lambda: Qwen2MoeConfig(
        **SIZES,
        shared_expert_intermediate_size=32,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=2,
        **_EXPERTS,
    ),
    "gemma": lambda: GemmaConfig(**SIZES, head_dim=32),
    "gemma2": lambda: Gemma2Config(
        **SIZES, head_dim=32, query_pre_attn_scalar=32, sliding_window=5, attn_logit_softcapping=2.0
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 7, "num_attention_heads": 2, "num_key_value_heads": 1},
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=5,
    ),
    "gemma3-softcap": lambda: Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 2},
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=5,
        layer_types=["full_attention", "sliding_attention"],
        final_logit_softcapping=3.0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    **tiny_classic.CONFIGS,
    **tiny_hybrids.CONFIGS,
    **tiny_newer.CONFIGS,
    **tiny_further.CONFIGS,
    **tiny_state_spaces.CONFIGS,
}

CONFIGS |= {
    "phi3": lambda: Phi3Config(**SIZES, sliding_window=7),
    "phi3-longrope": lambda: Phi3Config(
        **SIZES,
        original_max_position_embeddings=16,
        partial_rotary_factor=0.75,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0],
        },
    ),
    "olmo2": lambda: Olmo2Config(**SIZES),
    "olmo3": lambda: Olmo3Config(
        **{**SIZES, "num_hidden_layers": 4},
        sliding_window=5,
        rope_parameters={
            "full_attention": rope("yarn", factor=4.0, original_max_position_embeddings=16),
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "granite": lambda: GraniteConfig(
        **SIZES,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.15,
        logits_scaling=2.0,
        tie_word_embeddings=True,
    ),
    "smollm3": lambda: SmolLM3Config(**{**SIZES, "num_hidden_layers": 5}),
    "smollm3-list": lambda: SmolLM3Config(**SIZES, no_rope_layers=[0, 1, 1], attention_bias=True),
    "starcoder2": lambda: Starcoder2Config(**SIZES),
    "stablelm": lambda: StableLmConfig(**SIZES, use_qkv_bias=True),
    "stablelm-parallel": lambda: StableLmConfig(**SIZES, use_parallel_residual=True, partial_rotary_factor=0.5),
    "stablelm-qk-norm": lambda: StableLmConfig(**SIZES, qk_layernorm=True, use_parallel_residual=True),
    "nemotron": lambda: NemotronConfig(**SIZES),
    "cohere2": lambda: Cohere2Config(**{**SIZES, "num_hidden_layers": 4}, sliding_window=5, logit_scale=0.25),
    "glm4": lambda: Glm4Config(**SIZES, head_dim=16),
    "exaone4": lambda: Exaone4Config(**SIZES, sliding_window=None, layer_types=["full_attention"] * 3),
    "exaone4-window": lambda: Exaone4Config(**{**SIZES, "num_hidden_layers": 4}, sliding_window=5),
}

_LATENT = {
    **SIZES,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 3,
}

CONFIGS |= {
    "deepseek2": lambda: DeepseekV2Config(**_LATENT, q_lora_rank=None, n_routed_experts=6, n_shared_experts=2),
    "deepseek2-groups": lambda: DeepseekV2Config(
        **_LATENT,
        q_lora_rank=24,
        n_routed_experts=8,
        n_shared_experts=1,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        attention_bias=True,
        rope_parameters=rope("yarn", factor=4.0, mscale=0.707, mscale_all_dim=0.707),
    ),
    "deepseek3": lambda: DeepseekV3Config(
        **_LATENT,
        q_lora_rank=24,
        n_routed_experts=8,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        rope_parameters=rope("yarn", factor=4.0, mscale=1.0, mscale_all_dim=1.0),
    ),
    "deepseek3-halves": lambda: DeepseekV3Config(
        **_LATENT,
        q_lora_rank=None,
        n_routed_experts=4,
        n_shared_experts=2,
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        rope_interleave=False,
        tie_word_embeddings=True,
    ),
}

_GLM_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 1}

CONFIGS |= {
    "glm4moe": lambda: Glm4MoeConfig(**SIZES, **_GLM_EXPERTS, head_dim=32, use_qk_norm=True, attention_bias=True),
    "glm4moe-groups": lambda: Glm4MoeConfig(
        **SIZES,
        **_GLM_EXPERTS,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=2,
        norm_topk_prob=False,
        routed_scaling_factor=1.5,
        tie_word_embeddings=True,
    ),
    "glm4moe-lite": lambda: Glm4MoeLiteConfig(
        **{k: v for k, v in _LATENT.items() if k != "first_k_dense_replace"},
        q_lora_rank=24,
        n_routed_experts=4,
        n_shared_experts=1,
        mlp_layer_types=["dense", "dense", "sparse"],
        rms_norm_eps=1e-6,
    ),
}

CONFIGS |= {
    "gpt-oss": lambda: GptOssConfig(
        **{**SIZES, "num_hidden_layers": 4},
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=5,
        rope_parameters=rope("yarn", factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False),
    ),
    "gpt-oss-list": lambda: GptOssConfig(
        **SIZES,
        head_dim=32,
        num_local_experts=6,
        num_experts_per_tok=3,
        sliding_window=7,
        layer_types=["full_attention", "full_attention", "sliding_attention"],
        swiglu_limit=0.5,
        tie_word_embeddings=True,
        attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": 150000.0},
    ),
}

# Norms of these multiply by 1 + weight.
_OFFSET_NORMS = ("gemma", "nemotron", "step35")
_PLAIN_NORMS = ("gemma3n", "gemma4", "nemotron-h")

# Groups of layers with block tables of their own, as many as any of these has.
NUM_CACHE_GROUPS = 7

# GGUF files of these architectures have no place for what makes the configuration special.
_NO_GGUF = {
    "deepseek3-halves",
    "qwen2-window",
    "gemma3-softcap",
    "gpt-oss-list",
    "ministral",
    "qwen2moe-mixed",
    "qwen3moe-mixed",
    "smollm3-list",
    *tiny_classic.WITHOUT_GGUF,
    *tiny_hybrids.WITHOUT_GGUF,
    *tiny_newer.WITHOUT_GGUF,
    *tiny_further.WITHOUT_GGUF,
    *tiny_state_spaces.WITHOUT_GGUF,
}
GGUF_CONFIGS = [name for name in CONFIGS if name not in _NO_GGUF]


def config_values(name: str) -> dict[str, Any]:
    """Return the configuration as in config.json."""
    values: dict[str, Any] = CONFIGS[name]().to_dict()
    return values


def tiny_model(name: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    """Return the model in float32, with weights large enough that every part of it affects the logits.

    changes: other values of its configuration.
    """
    torch.manual_seed(seed)
    # The eager form of Falcon in transformers adds the slopes of ALiBi twice.
    form = "sdpa" if name == "falcon-alibi" else "eager"
    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=form).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.1 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
            is_offset = name.startswith(_OFFSET_NORMS) and not name.startswith(_PLAIN_NORMS)
            if parameter.dim() == 1 and parameter_name.endswith(("weight", "scale")) and not is_offset:
                parameter += 1.0
            if name.startswith("zamba2") and parameter_name.endswith(".linear.weight"):
                # No residual goes around the shared blocks: their norms would make the rounding of a cache large.
                parameter *= 0.05
            if "embed_tokens" in parameter_name or parameter_name.endswith("embeddings.weight"):
                parameter *= parameter.shape[-1] ** 0.25
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.1)
            if buffer_name.endswith("layer_scalar"):
                buffer.uniform_(0.7, 1.3)
    return model


def expected_logits(model: PreTrainedModel, token_ids: list[int]) -> NDArray[np.float32]:
    """Return the logits [tokens, vocab], in float32."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([token_ids])).logits[0].numpy()


def tiny_graph(name: str, seed: int = 0, **changes: object) -> tuple[Graph, dict[str, Weight]]:
    """Return the model as our unoptimized graph, with its weights by name, without touching the disk.

    changes: other values of its configuration.
    """
    model = tiny_model(name, seed, **changes)
    module = load_architecture(model.config.model_type)
    config = module.Config.from_hf(ConfigReader(model.config.to_dict()))
    table = weight_table(module)
    stored = {checkpoint_name(n, table): _source(n, array) for n, array in stored_tensors(model).items()}
    sources = transformed(stored, table.transforms, config, "safetensors")
    weights = {name: source.make() for name, source in sources.items()}
    return build_graph(model.config.model_type, config, {n: w.shape for n, w in weights.items()}), weights


def graph_weights(model: PreTrainedModel, architecture: str) -> dict[str, NDArray[np.float32]]:
    """Return the weights of a model without transforms, under the names of the graph."""
    table = weight_table(load_architecture(architecture))
    return {checkpoint_name(name, table): array for name, array in stored_tensors(model).items()}


def stored_tensors(model: PreTrainedModel) -> dict[str, NDArray[np.float32]]:
    """Return the tensors of a safetensors file by name."""
    tensors = revert_weight_conversion(model, dict(model.state_dict()))
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def _source(name: str, array: NDArray[np.float32]) -> Source:
    weight = DenseWeight(array)
    return Source(weight.type_name, weight.shape, weight.nbytes, (name,), lambda: weight)


def save_safetensors(model: PreTrainedModel, directory: Path) -> Path:
    """Save config.json and model.safetensors, and return the directory."""
    model.save_pretrained(directory)
    return directory
