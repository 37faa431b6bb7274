"""OLMo 2 and 3: norms after attention and MLP only, and on q and k as a whole. arXiv 2501.00656."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.graph.builder import Graph
from octavo.graph.values import Value
from octavo.models._attention import AttentionConfig, same_windows, windows_from_gguf, windows_from_hf
from octavo.models._decoder import DecoderConfig, hf_rope
from octavo.models._layers import attention, mlp
from octavo.models._reading import ConfigReader
from octavo.models._rope import rope_from_hf, rope_section, scaled
from octavo.models._weights import WeightTable

# GGUF files have the name olmo2 for both.
ALIASES = ("olmo3",)
WEIGHTS = WeightTable(
    names={
        "blk.*.post_attention_norm": "layers.*.post_attention_layernorm",
        "blk.*.post_ffw_norm": "layers.*.post_feedforward_layernorm",
    }
)
PATTERN = 4  # OLMo 3: every fourth layer is global
THETA_3 = 5e5  # rotary base of OLMo 3
_LOCAL = "sliding_attention"


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Configuration of OLMo 2 and 3. OLMo 3 scales positions in its global layers only."""

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        window = reader.integer("attention.sliding_window", 0, low=0) or None
        attention = AttentionConfig(windows_from_gguf(reader, PATTERN, window), qk_norm=True)
        plain = cls.read_gguf(reader, shapes, attention=attention)
        if window is None:
            return plain
        theta = reader.number("rope.freq_base", 10000.0, low=1.0)
        return replace(plain, rope=replace(plain.rope, local=scaled(plain.rope.rotary_dim, theta)))

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        if reader.text("model_type", "olmo2") != "olmo3":
            return cls.read_hf(reader, attention=AttentionConfig(same_windows(reader), qk_norm=True))
        ropes = reader.section("rope_parameters")
        by_kind = ropes.has("full_attention")
        rope = ropes.section("full_attention") if by_kind else rope_section(reader)
        attention = AttentionConfig(windows_from_hf(reader, PATTERN), qk_norm=True)
        plain = cls.read_hf(reader, attention=attention, rope=hf_rope(reader, rope, THETA_3))
        theta = rope.number("rope_theta", reader.number("rope_theta", THETA_3, low=1.0), low=1.0)
        local = ropes.section(_LOCAL) if by_kind else ConfigReader({})
        local_rope = rope_from_hf(local, plain.head_dim, theta, plain.max_position_embeddings)
        return replace(plain, rope=replace(plain.rope, local=local_rope))


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    h = g.embedding("embed_tokens")
    for i in range(cfg.num_layers):
        x = attention(g, h, cfg, i)
        h = h + g.rms_norm(x, f"layers.{i}.post_attention_layernorm", cfg.norm_eps)
        x = mlp(g, h, cfg, i)
        h = h + g.rms_norm(x, f"layers.{i}.post_feedforward_layernorm", cfg.norm_eps)
    h = g.rms_norm(g.select_rows(h), "norm", cfg.norm_eps)
    return g.logits(h, cfg.output_head)
