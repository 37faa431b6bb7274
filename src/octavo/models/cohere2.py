"""Command R7B and A: parallel attention and MLP; layers with a window rotate, global ones do not. arXiv 2501.18795."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.graph.builder import Graph
from octavo.graph.values import Value
from octavo.models._attention import AttentionConfig, Windows, windows_from_gguf, windows_from_hf
from octavo.models._decoder import DecoderConfig, gguf_rope, hf_rope
from octavo.models._layers import attention, mlp
from octavo.models._reading import ConfigReader
from octavo.models._weights import WeightTable, rotary_pairs

# Both kinds of files have the two columns of a rotated pair side by side.
WEIGHTS = WeightTable(transforms=rotary_pairs())
PATTERN = 4  # every fourth layer is global


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Cohere 2's configuration, with a factor for the logits."""

    logit_scale: float = 1.0

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        windows = windows_from_gguf(reader, PATTERN, reader.integer("attention.sliding_window"))
        return cls.read_gguf(
            reader,
            shapes,
            norm_eps="attention.layer_norm_epsilon",
            attention=AttentionConfig(windows),
            rope=replace(gguf_rope(reader), rotates=_have_windows(windows)),
            logit_scale=reader.number("logit_scale"),
        )

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        reader = reader.with_defaults({"tie_word_embeddings": True, "layer_norm_eps": 1e-5})
        if reader.flag("use_qk_norm", False):
            raise reader.error("use_qk_norm", True, "norms on q and k are not supported")
        windows = windows_from_hf(reader, PATTERN)
        return cls.read_hf(
            reader,
            norm_eps="layer_norm_eps",
            attention=AttentionConfig(windows),
            rope=replace(hf_rope(reader), rotates=_have_windows(windows)),
            logit_scale=reader.number("logit_scale", 0.0625),
        )


def _have_windows(windows: Windows) -> tuple[bool, ...]:
    return tuple(window is not None for window in windows)


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    h = g.embedding("embed_tokens")
    for i in range(cfg.num_layers):
        x = g.layer_norm(h, f"layers.{i}.input_layernorm", cfg.norm_eps)
        h = h + attention(g, x, cfg, i, centered=True)
        h = h + mlp(g, x, cfg, i)
    h = g.layer_norm(g.select_rows(h), "norm", cfg.norm_eps)
    return g.logits(h, cfg.output_head, scale=cfg.logit_scale)
