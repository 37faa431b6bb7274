"""LongCat Flash: two latent attentions and two MLPs in each layer, in parallel with experts, some of them identities.

Meituan, arXiv 2509.01322.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.errors import ModelLoadError
from octavo.graph.builder import Graph
from octavo.graph.ops.moe import Routing
from octavo.graph.values import Value
from octavo.models import deepseek2
from octavo.models._layers import gated_mlp
from octavo.models._mlp import MLPConfig
from octavo.models._reading import MAX_WIDTH, ConfigReader
from octavo.models._weights import Stack, WeightTable
from octavo.models.deepseek2 import latent_attention, latent_transforms

# Keys of config.json and those of DeepSeek.
_KEYS = {
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "expert_ffn_hidden_size": "moe_intermediate_size",
    "moe_topk": "num_experts_per_tok",
}
# Flags that transformers does not read, and what it does.
_FIXED = {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "router_bias": False, "norm_topk_prob": False}
_ROUTER = "layers.*.mlp.router."


def _num_experts(cfg: Config) -> int:
    return cfg.num_experts


WEIGHTS = WeightTable(
    names={
        _ROUTER + "classifier": "layers.*.mlp.gate",
        _ROUTER + "e_score_correction_bias": "layers.*.mlp.gate.e_score_correction.bias",
    },
    transforms=(
        *latent_transforms("layers.*.self_attn.*."),
        # transformers writes unused numbers for the experts that return their input.
        *(
            Stack(f"layers.*.mlp.experts.*.{part}_proj", f"layers.*.mlp.experts.{part}_proj", count=_num_experts)
            for part in ("gate", "up", "down")
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Config(deepseek2.Config):
    """LongCat Flash's configuration.

    Query scaling is folded into the scores. The multi-token-prediction (MTP) layer is not used.

    num_experts: number of experts with weights.
    """

    num_experts: int = 1

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:  # noqa: ARG003
        raise ModelLoadError(
            "longcat_flash: llama.cpp has no GGUF form of this architecture; load its safetensors files"
        )

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        reader = reader.renamed(_KEYS).with_defaults({"rms_norm_eps": 1e-5, "rope_theta": 1e7})
        for key, value in _FIXED.items():
            if reader.flag(key, value) != value:
                raise reader.error(key, not value, f"must be {str(value).lower()}, as in transformers")
        if reader.text("zero_expert_type", "identity") != "identity":
            raise reader.error("zero_expert_type", reader.text("zero_expert_type"), "must be identity")
        count = reader.integer("n_routed_experts")
        identities = reader.integer("zero_expert_num", 0, low=0)
        experts = Routing(
            reader.integer("num_experts_per_tok", high=count + identities),
            normalize=False,
            scale=reader.number("routed_scaling_factor", 1.0),
            num_identities=identities,
        )
        plain = cls.latent_from_hf(reader, MLPConfig.from_hf(reader, experts))
        q_rank = reader.integer("q_lora_rank", high=MAX_WIDTH)
        scale = plain.attention.scale
        assert scale is not None
        return replace(
            plain,
            num_experts=count,
            attention=replace(plain.attention, scale=scale * (plain.hidden_size / q_rank) ** 0.5),
            latent_scale=(plain.hidden_size / plain.latent_dim) ** 0.5,
        )


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    h = g.embedding("embed_tokens")
    for i in range(cfg.num_layers):
        h = _layer(g, cfg, h, i)
    h = g.rms_norm(g.select_rows(h), "norm", cfg.norm_eps)
    return g.logits(h, cfg.output_head)


def _layer(g: Graph, cfg: Config, h: Value, layer: int) -> Value:
    """Build a layer. Its experts read the first MLP's input; their output is added after the second MLP."""
    p, experts = f"layers.{layer}.", cfg.mlp.experts
    assert experts is not None
    h, x = _attended(g, cfg, h, layer, 0)
    routed = g.moe(x, p + "mlp", experts)
    h, x = _attended(g, cfg, h + gated_mlp(g, x, p + "mlps.0"), layer, 1)
    return h + gated_mlp(g, x, p + "mlps.1") + routed


def _attended(g: Graph, cfg: Config, h: Value, layer: int, half: int) -> tuple[Value, Value]:
    """Return the hidden states after one of a layer's two attentions, plain and normed for the MLP."""
    p = f"layers.{layer}."
    h = h + latent_attention(g, cfg, g.rms_norm(h, f"{p}input_layernorm.{half}", cfg.norm_eps), layer, half=half)
    return h, g.rms_norm(h, f"{p}post_attention_layernorm.{half}", cfg.norm_eps)
