"""MiniCPM 3: latent attention as in DeepSeek V2, with scaled embeddings, residuals and logits. arXiv 2404.06395."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.graph.builder import Graph
from octavo.graph.values import Value
from octavo.models import deepseek2
from octavo.models._attention import AttentionConfig, same_windows
from octavo.models._decoder import gguf_rope, hf_rope
from octavo.models._layers import mlp
from octavo.models._reading import MAX_WIDTH, ConfigReader
from octavo.models._rope import RopeConfig
from octavo.models.deepseek2 import latent_attention, latent_transforms

WEIGHTS = replace(deepseek2.WEIGHTS, transforms=latent_transforms(joined=True))

# Of the published model; GGUF files do not have them.
_EMBEDDING, _DEPTH, _BASE = 12.0, 1.4, 256


@dataclass(frozen=True, slots=True)
class Config(deepseek2.Config):
    """MiniCPM 3's configuration, based on DeepSeek's: no experts, and three multipliers."""

    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        rope_dim = reader.integer("rope.dimension_count", low=2, high=MAX_WIDTH)
        head_dim = reader.integer("attention.key_length", low=rope_dim + 1, high=MAX_WIDTH)
        plain = cls.read_gguf(reader, shapes)
        value_dim = reader.integer("attention.value_length", plain.hidden_size // plain.num_heads, high=MAX_WIDTH)
        # Long-rope's factors apply only to the rotary columns.
        rope = gguf_rope(reader.replaced("attention.key_length", rope_dim))
        latent = reader.integer("attention.kv_lora_rank", high=MAX_WIDTH)
        return plain._of_heads(latent, rope, head_dim - rope_dim, value_dim)._scaled(_EMBEDDING, _DEPTH, _BASE)

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        num_heads = reader.integer("num_attention_heads", high=MAX_WIDTH)
        rope_dim = reader.integer("qk_rope_head_dim", 32, low=2, high=MAX_WIDTH)
        reader = reader.replaced("head_dim", rope_dim).with_defaults(
            {"num_key_value_heads": num_heads, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
        )
        plain = cls.read_hf(reader, attention=AttentionConfig(same_windows(reader)), rope=hf_rope(reader))
        value_dim = reader.integer("v_head_dim", plain.hidden_size // num_heads, high=MAX_WIDTH)
        latent = reader.integer("kv_lora_rank", 256, high=MAX_WIDTH)
        nope_dim = reader.integer("qk_nope_head_dim", 64, high=MAX_WIDTH)
        depth = reader.number("scale_depth", plain.num_layers**0.5)
        config = plain._of_heads(latent, plain.rope, nope_dim, value_dim)
        base = reader.integer("dim_model_base", plain.hidden_size, high=MAX_WIDTH)
        return config._scaled(reader.number("scale_emb", _EMBEDDING), depth, base)

    def _of_heads(self, latent_dim: int, rope: RopeConfig, nope_dim: int, value_dim: int) -> Config:
        config = self._with_latent(
            latent_dim=latent_dim,
            rope=rope.params,
            scale=(nope_dim + rope.rotary_dim) ** -0.5,
            nope_dim=nope_dim,
            head_value_dim=value_dim,
        )
        return replace(config, rope=rope, is_interleaved=False)

    def _scaled(self, embedding: float, depth: float, base: int) -> Config:
        return replace(
            self,
            embedding_multiplier=embedding,
            residual_multiplier=depth / self.num_layers**0.5,
            logit_multiplier=base / self.hidden_size,
        )

    def for_length(self, max_model_len: int) -> Config:
        return replace(self, rope=self.rope.for_length(max_model_len))


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    h = g.embedding("embed_tokens") * cfg.embedding_multiplier
    for i in range(cfg.num_layers):
        x = g.rms_norm(h, f"layers.{i}.input_layernorm", cfg.norm_eps)
        h = h + latent_attention(g, cfg, x, i) * cfg.residual_multiplier
        x = g.rms_norm(h, f"layers.{i}.post_attention_layernorm", cfg.norm_eps)
        h = h + mlp(g, x, cfg, i) * cfg.residual_multiplier
    h = g.rms_norm(g.select_rows(h), "norm", cfg.norm_eps)
    return g.logits(h, cfg.output_head, scale=cfg.logit_multiplier)
