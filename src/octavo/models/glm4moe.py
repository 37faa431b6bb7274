"""GLM 4.5 and 4.6: grouped queries with norms, experts as in DeepSeek V3. Zeng et al., arXiv 2508.06471."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.graph.builder import Graph
from octavo.graph.values import Value
from octavo.models._attention import AttentionConfig, same_windows, same_windows_from_gguf
from octavo.models._decoder import DecoderConfig
from octavo.models._heads import next_token_head, without_heads
from octavo.models._layers import attention, mlp
from octavo.models._mlp import MLPConfig
from octavo.models._reading import MAX_LAYERS, ConfigReader
from octavo.models._routing import grouped_from_gguf, grouped_from_hf
from octavo.models._weights import WeightTable, shared_expert_names, stacked_experts

ALIASES = ("glm4_moe",)
WEIGHTS = WeightTable(
    names={
        "blk.*.post_attention_norm": "layers.*.post_attention_layernorm",
        **shared_expert_names(),
    },
    transforms=stacked_experts(),
)


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Configuration of GLM 4.5 and 4.6. Multi-token-prediction (MTP) layers are not counted."""

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        reader = without_heads(reader)
        num_layers = reader.integer("block_count", high=MAX_LAYERS)
        qk_norm = "layers.0.self_attn.q_norm.weight" in shapes
        return cls.read_gguf(
            reader,
            shapes,
            attention=AttentionConfig(same_windows_from_gguf(reader), qk_norm=qk_norm),
            mlp=MLPConfig.from_gguf(
                reader,
                grouped_from_gguf(reader, shapes),
                first_experts=reader.integer("leading_dense_block_count", 0, low=0, high=num_layers),
                shared="plain" if reader.integer("expert_shared_count", 0, low=0) > 0 else None,
            ),
        )

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        reader = reader.with_defaults({"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5})
        return cls.read_hf(
            reader,
            attention=AttentionConfig(same_windows(reader), qk_norm=reader.flag("use_qk_norm", False)),
            mlp=MLPConfig.from_hf(
                reader,
                grouped_from_hf(reader),
                first_experts=reader.integer("first_k_dense_replace", 1, low=0, high=MAX_LAYERS),
                shared="plain" if reader.integer("n_shared_experts", 1, low=0) > 0 else None,
            ),
        )


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    h = g.embedding("embed_tokens")
    for i in range(cfg.num_layers):
        h = _layer(g, cfg, h, i)
    return g.logits(g.rms_norm(g.select_rows(h), "norm", cfg.norm_eps), cfg.output_head)


def build_draft(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the logits of the token after the next one. See `next_token_head`."""
    return next_token_head(g, cfg, _layer)


def _layer(g: Graph, cfg: Config, h: Value, layer: int) -> Value:
    p = f"layers.{layer}."
    h = h + attention(g, g.rms_norm(h, p + "input_layernorm", cfg.norm_eps), cfg, layer)
    return h + mlp(g, g.rms_norm(h, p + "post_attention_layernorm", cfg.norm_eps), cfg, layer)
