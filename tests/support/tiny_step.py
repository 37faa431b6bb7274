"""Step 3.5 as a causal language model: transformers has its text model, and the whole only behind an image encoder."""

from __future__ import annotations

from typing import Any, ClassVar

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, Step3p7TextConfig
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.step3p7.modeling_step3p7 import Step3p7PreTrainedModel, Step3p7TextModel

from tests.support.tiny_sizes import SIZES


class Step3p5ForCausalLM(Step3p7PreTrainedModel):  # type: ignore[misc]
    config_class = Step3p7TextConfig
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: Step3p7TextConfig) -> None:
        super().__init__(config)
        self.model = Step3p7TextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.lm_head

    def forward(self, input_ids: torch.Tensor, **options: Any) -> CausalLMOutput:
        output = self.model(input_ids, **options)
        return CausalLMOutput(logits=self.lm_head(output.last_hidden_state), hidden_states=output.hidden_states)


AutoModelForCausalLM.register(Step3p7TextConfig, Step3p5ForCausalLM, exist_ok=True)
# The authors' names, which transformers declares for the model with an image encoder.
register_checkpoint_conversion_mapping(
    "Step3p5ForCausalLM",
    [step for step in get_checkpoint_conversion_mapping("step3p7") if not step.target_patterns[0].startswith("model.")],
)

_STEP = {
    **{key: value for key, value in SIZES.items() if key != "pad_token_id"},
    "num_hidden_layers": 5,
    "head_dim": 16,
    "moe_num_experts": 8,
    "moe_top_k": 3,
    "moe_intermediate_size": 32,
    "share_expert_dim": 48,
}


def limited() -> Step3p7TextConfig:
    """Every switch of the published models."""
    return Step3p7TextConfig(
        **_STEP,
        layer_types=["full_attention", *["sliding_attention"] * 3, "full_attention"],
        sliding_window=6,
        attention_other_setting={"num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 16},
        rope_theta=[5e5, 1e4, 1e4, 1e4, 5e5],
        partial_rotary_factors=[0.5, 1.0, 1.0, 1.0, 0.5],
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        moe_layers_enum="2,3,4",
        moe_router_scaling_factor=3.0,
        swiglu_limits=[0.0, 0.0, 0.25, None, 0.5],
        swiglu_limits_shared=[0.25, None, 0.5, 0.25, 0.0],
    )


def plain() -> Step3p7TextConfig:
    """None of these switches, and others."""
    return Step3p7TextConfig(
        **_STEP,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        query_pre_attn_scalar=32,
        sliding_window=9,
        mlp_layer_types=["sparse", "dense", "sparse", "dense", "sparse"],
    )


def add_metadata(writer: gguf.GGUFWriter, config: Step3p7TextConfig) -> None:
    """The keys that differ from other decoders' keys. The converter accepts no other rotating shares than these."""
    local = [kind == "sliding_attention" for kind in config.layer_types]
    writer.add_head_count([layer.num_attention_heads for layer in config.per_layer_config])
    writer.add_head_count_kv([config.num_key_value_heads] * len(local))
    writer.add_sliding_window_pattern(local)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_shared_feed_forward_length(config.share_expert_dim)
    writer.add_expert_weights_scale(config.moe_router_scaling_factor)
    writer.add_expert_weights_norm(True)
    writer.add_leading_dense_block_count(config.mlp_layer_types.count("dense"))
    writer.add_swiglu_clamp_exp([limit or 0.0 for limit in config.swiglu_limits])
    writer.add_swiglu_clamp_shexp([limit or 0.0 for limit in config.swiglu_limits_shared])


def rotary_factors(config: Step3p7TextConfig) -> NDArray[np.float32]:
    """The factors of the columns that rotate in layers without a window, then ones."""
    rope = config.rope_parameters["full_attention"]
    plain = Step3p7TextModel(config).rotary_emb
    columns = int(config.head_dim * rope["partial_rotary_factor"])
    divisors = rope["rope_theta"] ** (-np.arange(0, columns, 2) / columns) / plain.full_attention_inv_freq.numpy()
    return np.concatenate([divisors, np.ones((config.head_dim - columns) // 2)]).astype(np.float32)
