"""GLM 4 (0414): norms around attention and MLP, half of each head rotates in neighbouring pairs. arXiv 2406.12793."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.graph.builder import Graph
from octavo.graph.values import Value
from octavo.models._attention import AttentionConfig, same_windows
from octavo.models._decoder import DecoderConfig
from octavo.models._layers import attention, mlp
from octavo.models._reading import ConfigReader
from octavo.models._weights import WeightTable, gate_and_up, rotary_pairs

WEIGHTS = WeightTable(
    names={
        "blk.*.post_attention_norm": "layers.*.post_self_attn_layernorm",
        "blk.*.post_ffw_norm": "layers.*.post_mlp_layernorm",
        "blk.*.ffn_up": "layers.*.mlp.gate_up_proj",
    },
    # Both kinds of files have the two columns of a rotated pair side by side.
    transforms=(gate_and_up(), *rotary_pairs()),
)


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """GLM 4 (0414)'s configuration. By default, half of each head rotates."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        return cls.read_hf(
            reader.with_defaults({"partial_rotary_factor": 0.5, "head_dim": 128, "rms_norm_eps": 1.5625e-7}),
            attention=AttentionConfig(same_windows(reader)),
        )


def build(g: Graph, cfg: DecoderConfig) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""

    def norm(x: Value, name: str) -> Value:
        return g.rms_norm(x, name, cfg.norm_eps)

    h = g.embedding("embed_tokens")
    for i in range(cfg.num_layers):
        p = f"layers.{i}."
        x = attention(g, norm(h, p + "input_layernorm"), cfg, i)
        h = h + norm(x, p + "post_self_attn_layernorm")
        x = mlp(g, norm(h, p + "post_attention_layernorm"), cfg, i)
        h = h + norm(x, p + "post_mlp_layernorm")
    return g.logits(norm(g.select_rows(h), "norm"), cfg.output_head)
