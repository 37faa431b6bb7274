"""Parts shared by Gemma 3n and 4: per-layer inputs, and layers that reuse another layer's keys and values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from octavo.graph.builder import Graph
from octavo.graph.ops.attention import AttentionParams
from octavo.graph.ops.rowwise import GatedActivation
from octavo.graph.ops.streams import Columns
from octavo.graph.values import Value
from octavo.models import gemma2
from octavo.models._attention import Windows
from octavo.models._reading import MAX_LAYERS, ConfigReader
from octavo.models._weights import WeightTable

# Norms multiply by the weight itself, unlike those of Gemma 1 to 3.
WEIGHTS = WeightTable(
    names={
        **gemma2.WEIGHTS.names,
        "per_layer_token_embd": "embed_tokens_per_layer",
        "per_layer_model_proj": "per_layer_model_projection",
        "per_layer_proj_norm": "per_layer_projection_norm",
        "blk.*.inp_gate": "layers.*.per_layer_input_gate",
        "blk.*.proj": "layers.*.per_layer_projection",
        "blk.*.post_norm": "layers.*.post_per_layer_input_norm",
    },
)


@dataclass(frozen=True, slots=True)
class Config(gemma2.Config):
    """Fields that Gemma 3n and 4 add to a decoder's configuration."""

    sources: tuple[int, ...] = ()  # [num_layers]: the layer whose keys and values each one reads
    input_width: int = 0  # columns of a layer's own input; 0 if there is none

    def attention_params(self, layer: int) -> AttentionParams:
        return gemma2.Config.attention_params(self, self.sources[layer])


def inputs_of_layers(g: Graph, h: Value, cfg: Config) -> Value:
    """Return the inputs of all layers side by side, `input_width` columns each.

    h: the scaled embeddings.
    """
    table = g.embedding("embed_tokens_per_layer", has_all=False) * math.sqrt(cfg.input_width)
    projected = g.linear(h, "per_layer_model_projection") * (1.0 / math.sqrt(cfg.hidden_size))
    return (g.rms_norm(projected, "per_layer_projection_norm", cfg.norm_eps) + table) * math.sqrt(0.5)


def gated_input(g: Graph, x: Value, inputs: Value, layer: int, cfg: Config) -> Value:
    """Multiply a layer's input by a gate computed from x, and project it: [TOKENS, hidden]."""
    p = f"layers.{layer}."
    gate = g.linear(x, p + "per_layer_input_gate")
    own = g.add(Columns(inputs, layer * cfg.input_width, cfg.input_width))
    gated = g.add(GatedActivation(gate, own, "gelu_tanh"))
    return g.rms_norm(g.linear(gated, p + "per_layer_projection"), p + "post_per_layer_input_norm", cfg.norm_eps)


def cache_sources(reader: ConfigReader, key: str, windows: Windows, shared: int) -> tuple[int, ...]:
    """Return the layer whose keys and values each layer reads. Raises ModelLoadError naming the key if there is none.

    Each of the last `shared` layers reads from the last earlier layer of its kind.
    """
    first = len(windows) - shared
    if first < 1:
        raise reader.error(key, shared, f"must be less than the {len(windows)} layers")
    last = {window: layer for layer, window in enumerate(windows[:first])}
    for window in windows[first:]:
        if window not in last:
            kind = "without" if window is None else "with"
            raise reader.error(key, shared, f"no layer {kind} a window is left that has keys and values of its own")
    return (*range(first), *(last[window] for window in windows[first:]))


def text_section(reader: ConfigReader, defaults: dict[str, object]) -> ConfigReader:
    """Return the part of config.json about text, with defaults. Refuses bidirectional attention."""
    reader = (reader.section("text_config") if reader.has("text_config") else reader).with_defaults(defaults)
    key = "use_bidirectional_attention"
    if reader.value(key) not in (None, False, "vision"):
        raise reader.error(key, reader.value(key), "bidirectional attention is not supported")
    return reader


def with_widest_mlp(reader: ConfigReader, key: str, layers: str) -> ConfigReader:
    """Replace a per-layer list of MLP widths with the widest. The weights' shapes give each layer's actual width."""
    if isinstance(reader.value(key), (list, tuple, np.ndarray)):
        return reader.with_largest(key, reader.integer(layers, high=MAX_LAYERS))
    return reader
