"""Granite 3, dense: Llama with multipliers on embeddings, residuals, attention and logits. arXiv 2408.13359 (muP)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from octavo.graph.builder import Graph
from octavo.graph.values import Value
from octavo.models._attention import AttentionConfig, same_windows
from octavo.models._decoder import DecoderConfig
from octavo.models._layers import attention, mlp
from octavo.models._reading import ConfigReader
from octavo.models.llama import WEIGHTS

ALIASES = ("granite_docling_text",)

__all__ = ["WEIGHTS", "Config", "build"]


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Granite's configuration, with multipliers. The logits are divided by `logits_scaling`."""

    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        return scaled_gguf(cls.read_gguf(reader, shapes), reader)

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        return scaled_hf(cls.read_hf(reader, attention=AttentionConfig(same_windows(reader))), reader)


ScaledT = TypeVar("ScaledT", bound=Config)


def scaled_gguf(config: ScaledT, reader: ConfigReader) -> ScaledT:
    """Return the configuration with the multipliers of a GGUF file."""
    return replace(
        config,
        attention=replace(config.attention, scale=reader.optional_number("attention.scale")),
        embedding_multiplier=reader.number("embedding_scale", 1.0),
        residual_multiplier=reader.number("residual_scale", 1.0),
        logits_scaling=reader.number("logit_scale", 1.0),
    )


def scaled_hf(config: ScaledT, reader: ConfigReader) -> ScaledT:
    """Return the configuration with the multipliers of config.json."""
    return replace(
        config,
        attention=replace(config.attention, scale=reader.number("attention_multiplier", 1.0)),
        embedding_multiplier=reader.number("embedding_multiplier", 1.0),
        residual_multiplier=reader.number("residual_multiplier", 1.0),
        logits_scaling=reader.number("logits_scaling", 1.0),
    )


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    h = g.embedding("embed_tokens") * cfg.embedding_multiplier
    for i in range(cfg.num_layers):
        x = g.rms_norm(h, f"layers.{i}.input_layernorm", cfg.norm_eps)
        h = h + attention(g, x, cfg, i) * cfg.residual_multiplier
        x = g.rms_norm(h, f"layers.{i}.post_attention_layernorm", cfg.norm_eps)
        h = h + mlp(g, x, cfg, i) * cfg.residual_multiplier
    h = g.rms_norm(g.select_rows(h), "norm", cfg.norm_eps)
    return g.logits(h, cfg.output_head, scale=1.0 / cfg.logits_scaling)
