"""gpt-oss: attention sinks, windows in every second layer, biased experts with clamped gates. arXiv 2508.10925."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from octavo.graph.builder import Graph
from octavo.graph.ops.moe import Routing
from octavo.graph.values import Value
from octavo.models._attention import AttentionConfig, Windows, windows_of_pattern, windows_of_types
from octavo.models._decoder import DecoderConfig, hf_rope
from octavo.models._layers import attention
from octavo.models._mlp import MLPConfig, experts_from_gguf, experts_from_hf
from octavo.models._reading import MAX_LAYERS, ConfigReader
from octavo.models._rope import rope_from_gguf
from octavo.models._weights import Permute, Split, Transpose, WeightTable

ALIASES = ("gpt-oss",)

PATTERN = 2  # every second layer has no window
_ALPHA = 1.702  # slope of quick_gelu
_EXPERTS = "layers.*.mlp.experts."
_GATE_UP = _EXPERTS + "gate_up_proj"


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Configuration of gpt-oss. The even layers have a window."""

    gate_limit: float = 7.0

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        mlp = MLPConfig.from_gguf(reader, experts_from_gguf(reader, normalize=True))
        plain = cls.read_gguf(reader, shapes, mlp=mlp)
        # llama.cpp rounds the ends of YaRN's ramp; the model was trained without rounding.
        rope = rope_from_gguf(reader, plain.head_dim, plain.max_position_embeddings, truncate=False)
        window = reader.integer("attention.sliding_window")
        return replace(
            plain,
            attention=AttentionConfig(_alternate(reader, plain.num_layers, window), sinks=True),
            rope=replace(plain.rope, params=rope),
        )

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        alpha = reader.number("swiglu_alpha", _ALPHA)
        if alpha != _ALPHA:
            raise reader.error("swiglu_alpha", alpha, f"must be {_ALPHA}")
        num_layers, window = reader.integer("num_hidden_layers", high=MAX_LAYERS), reader.integer("sliding_window", 128)
        reader = reader.with_defaults({"head_dim": 64, "rms_norm_eps": 1e-5})
        return cls.read_hf(
            reader,
            attention=AttentionConfig(_alternate(reader, num_layers, window), sinks=True),
            rope=hf_rope(reader, theta=150000.0),
            mlp=MLPConfig.from_hf(reader, experts_from_hf(reader, normalize=True)),
            gate_limit=reader.number("swiglu_limit", 7.0),
        )


def _alternate(reader: ConfigReader, num_layers: int, window: int) -> Windows:
    if reader.has("layer_types"):
        return windows_of_types(reader, num_layers, window)
    return windows_of_pattern(reader, "attention.sliding_window_pattern", num_layers, PATTERN, window)


def _gate_then_up(cfg: Config) -> NDArray[np.intp]:
    """Return the stored rows of gate, then of up, which alternate in safetensors files."""
    rows = np.arange(2 * cfg.mlp.intermediate_size)
    return np.concatenate([rows[::2], rows[1::2]])


WEIGHTS = WeightTable(
    names={
        "blk.*.post_attention_norm": "layers.*.post_attention_layernorm",
        "layers.*.mlp.router": "layers.*.mlp.gate",
        # Unquantized experts are [in, out] and have no suffix; MXFP4 experts are [out, in].
        _GATE_UP: _EXPERTS + "gate_up_columns.weight",
        _GATE_UP + "_bias": _GATE_UP + ".bias",
        _EXPERTS + "down_proj": _EXPERTS + "down_columns.weight",
        _EXPERTS + "down_proj_bias": _EXPERTS + "down_proj.bias",
    },
    transforms=(
        Transpose(_EXPERTS + "gate_up_columns", "safetensors", whole=_GATE_UP),
        Transpose(_EXPERTS + "down_columns", "safetensors", whole=_EXPERTS + "down_proj"),
        Permute(_GATE_UP, _gate_then_up, "safetensors"),
        Split(
            _GATE_UP,
            (_EXPERTS + "gate_proj", _EXPERTS + "up_proj"),
            lambda c: (c.mlp.intermediate_size,) * 2,
            "safetensors",
        ),
    ),
)


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    routing = cfg.mlp.experts or Routing(1)
    h = g.embedding("embed_tokens")
    for i in range(cfg.num_layers):
        x = g.rms_norm(h, f"layers.{i}.input_layernorm", cfg.norm_eps)
        h = h + attention(g, x, cfg, i)
        x = g.rms_norm(h, f"layers.{i}.post_attention_layernorm", cfg.norm_eps)
        h = h + g.moe(x, f"layers.{i}.mlp", routing, kind="quick_gelu", limit=cfg.gate_limit, up_offset=1.0)
    h = g.rms_norm(g.select_rows(h), "norm", cfg.norm_eps)
    return g.logits(h, cfg.output_head)
