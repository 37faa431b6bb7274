"""OLMo 2 and 3: norms after attention and MLP only, and on q and k as a whole. arXiv 2501.00656."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.graph.builder import Graph
from octavo.graph.ops import RopeParams
from octavo.graph.values import Value
from octavo.models._decoder import DecoderConfig, rope_section, windows_from_hf, windows_of_pattern
from octavo.models._layers import attention, mlp
from octavo.models._reading import MAX_LAYERS, ConfigReader
from octavo.models._rope import rope_from_hf, scaled
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
THETA_3 = 5e5  # of OLMo 3
_LOCAL = "sliding_attention"


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """The shared configuration; OLMo 3 scales positions in its global layers only."""

    qk_norm: bool = True
    local_rope: RopeParams | None = None  # of layers with a window

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        plain = cls.read_gguf(reader, shapes)
        window = reader.integer("attention.sliding_window", 0, low=0) or None
        theta = reader.number("rope.freq_base", 10000.0, low=1.0)
        key = "attention.sliding_window_pattern"
        return replace(
            plain,
            windows=windows_of_pattern(reader, key, plain.num_layers, PATTERN, window),
            local_rope=scaled(plain.rotary_dim, theta) if window else None,
        )

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        if reader.text("model_type", "olmo2") != "olmo3":
            return cls.read_hf(reader, windows=(None,) * reader.integer("num_hidden_layers", high=MAX_LAYERS))
        ropes = reader.section("rope_parameters")
        by_kind = ropes.has("full_attention")
        rope = ropes.section("full_attention") if by_kind else rope_section(reader)
        plain = cls.read_hf(reader, rope=rope, windows=windows_from_hf(reader, PATTERN), theta=THETA_3)
        theta = rope.number("rope_theta", reader.number("rope_theta", THETA_3, low=1.0), low=1.0)
        local = ropes.section(_LOCAL) if by_kind else ConfigReader({})
        return replace(plain, local_rope=rope_from_hf(local, plain.head_dim, theta, plain.max_position_embeddings))


def build(g: Graph, cfg: Config) -> Value:
    """The logits [LOGITS, vocab]."""
    h = g.embedding("embed_tokens")
    for i, window in enumerate(cfg.windows):
        x = attention(g, h, cfg, i, cfg.rope if window is None else cfg.local_rope)
        h = h + g.rms_norm(x, f"layers.{i}.post_attention_layernorm", cfg.norm_eps)
        x = mlp(g, h, cfg, i)
        h = h + g.rms_norm(x, f"layers.{i}.post_feedforward_layernorm", cfg.norm_eps)
    h = g.rms_norm(g.select_rows(h), "norm", cfg.norm_eps)
    return g.logits(h, cfg.output_head)
