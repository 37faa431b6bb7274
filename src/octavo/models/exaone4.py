"""EXAONE 4: norms after attention and MLP, norms on heads, and no rotation in global layers. arXiv 2507.11407."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.graph.builder import Graph
from octavo.graph.values import Value
from octavo.models._attention import (
    AttentionConfig,
    Windows,
    same_windows,
    windows_from_gguf,
    windows_of_pattern,
    windows_of_types,
)
from octavo.models._decoder import DecoderConfig, gguf_rope, hf_rope
from octavo.models._layers import attention, mlp
from octavo.models._reading import MAX_LAYERS, ConfigReader
from octavo.models._rope import RopeConfig
from octavo.models.olmo2 import WEIGHTS

__all__ = ["WEIGHTS", "Config", "build"]

PATTERN = 4  # every fourth layer is global


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """EXAONE 4's configuration. The 1.2B model has no windows and rotates in every layer."""

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        windows = windows_from_gguf(reader, PATTERN, reader.integer("attention.sliding_window", 0, low=0) or None)
        attention = AttentionConfig(windows, qk_norm=True)
        return cls.read_gguf(reader, shapes, attention=attention, rope=_local(gguf_rope(reader), windows))

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        windows = _hf_windows(reader)
        attention = AttentionConfig(windows, qk_norm=True)
        return cls.read_hf(reader, attention=attention, rope=_local(hf_rope(reader), windows))


def build(g: Graph, cfg: DecoderConfig) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    h = g.embedding("embed_tokens")
    for i in range(cfg.num_layers):
        x = attention(g, h, cfg, i)
        h = h + g.rms_norm(x, f"layers.{i}.post_attention_layernorm", cfg.norm_eps)
        x = mlp(g, h, cfg, i)
        h = h + g.rms_norm(x, f"layers.{i}.post_feedforward_layernorm", cfg.norm_eps)
    h = g.rms_norm(g.select_rows(h), "norm", cfg.norm_eps)
    return g.logits(h, cfg.output_head)


def _local(rope: RopeConfig, windows: Windows) -> RopeConfig:
    """Turn off rotation in the layers without a window, if other layers have one."""
    return replace(rope, rotates=tuple(window is not None for window in windows)) if any(windows) else rope


def _hf_windows(reader: ConfigReader) -> Windows:
    if not reader.has("sliding_window"):
        return same_windows(reader)
    num_layers = reader.integer("num_hidden_layers", high=MAX_LAYERS)
    window = reader.integer("sliding_window")
    if reader.has("layer_types"):
        return windows_of_types(reader, num_layers, window)
    key, pattern = "sliding_window_pattern", reader.value("sliding_window_pattern")
    if not isinstance(pattern, str):
        return windows_of_pattern(reader, key, num_layers, PATTERN, window)
    # "LLLG", repeated; the last layer is always global.
    if not pattern or set(pattern) - {"L", "G"}:
        raise reader.error(key, pattern, "must be a number, or letters L (local) and G (global)")
    local = [pattern[layer % len(pattern)] == "L" for layer in range(num_layers - 1)]
    return (*(window if flag else None for flag in local), None)
