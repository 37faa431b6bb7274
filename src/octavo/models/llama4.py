"""Llama 4, text: chunked attention, some layers without rotation, and in some layers a shared and a routed expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.graph.builder import Graph
from octavo.graph.ops.attention import AttentionParams, Rope
from octavo.graph.ops.moe import Routing
from octavo.graph.values import Value
from octavo.models import llama
from octavo.models._attention import AttentionConfig, QueryGrowth, Windows
from octavo.models._decoder import DecoderConfig, gguf_rope, hf_rope
from octavo.models._mlp import MLPConfig, experts_from_gguf, experts_from_hf
from octavo.models._reading import MAX_LAYERS, MAX_WIDTH, ConfigReader
from octavo.models._rope import rope_section, rotating_layers
from octavo.models._weights import WeightTable, fused_experts, rotary_pairs, stacked_experts

ALIASES = ("llama4_text",)

_INTERVAL = 4  # every fourth layer sees all tokens and has no rotary positions
_CHUNK = 8192
_FLOOR = 8192  # positions that share a factor of queries
_GROWTH = 0.1
_MIN_FLOOR, _MAX_GROWTH = 16, 100.0  # bounds the table of factors
_UNNORMED_EXPERTS = 128  # the model with this many experts has no norms on q and k; GGUF files do not record that
_SCALINGS = ("default", "linear", "llama3")  # scalings without a factor that a norm would cancel


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Llama 4's configuration. `intermediate_size` is the width of an expert.

    In layers without rotary positions, queries are scaled up with their positions.
    """

    def attention_params(self, layer: int) -> AttentionParams:
        params = DecoderConfig.attention_params(self, layer)
        if self.rope_params(layer) is None:
            return params
        return replace(params, query_scales=None, scale_length=1, scale_offset=0)

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        num_layers = reader.integer("block_count", high=MAX_LAYERS)
        # llama.cpp has one pattern; a window of 0 turns it off, and files cannot give other values.
        pattern = reader.integer("attention.sliding_window", _CHUNK, low=0) > 0
        rotates = rotating_layers(num_layers, _INTERVAL) if pattern else (True,) * num_layers
        part = MLPConfig.from_gguf(reader, _on_input(experts_from_gguf(reader, normalize=False)), shared="plain")
        width = reader.integer("expert_feed_forward_length", part.intermediate_size, high=MAX_WIDTH)
        return cls.read_gguf(
            reader,
            shapes,
            attention=AttentionConfig(
                tuple(_CHUNK if pattern and rotating else None for rotating in rotates),
                chunked=True,
                qk_norm=reader.integer("expert_count", 0, low=0) != _UNNORMED_EXPERTS,
                query_growth=QueryGrowth(_GROWTH, _FLOOR, 1) if pattern else None,
            ),
            rope=replace(gguf_rope(reader), rotates=rotates),
            mlp=replace(part, intermediate_size=width),
        )

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        if reader.has("text_config"):
            outer, reader = reader, reader.section("text_config")
            reader = reader.with_defaults({"tie_word_embeddings": outer.flag("tie_word_embeddings", False)})
        reader = reader.with_defaults({"rms_norm_eps": 1e-5})
        num_layers = reader.integer("num_hidden_layers", high=MAX_LAYERS)
        rotates = rotating_layers(num_layers, reader.integer("no_rope_layer_interval", _INTERVAL))
        if reader.has("no_rope_layers") and reader.value("no_rope_layers") != []:
            rotates = reader.flags("no_rope_layers", num_layers)  # 1: rotates, despite the name
        reader.integer("intermediate_size_mlp", 16384, high=MAX_WIDTH)  # of plain layers; their weights show it
        section = rope_section(reader)
        kind = section.text("rope_type", section.text("type", "default"))
        qk_norm = reader.flag("use_qk_norm", True)
        if qk_norm and kind not in _SCALINGS:
            raise section.error("rope_type", kind, f"must be {', '.join(_SCALINGS)} in a model with norms of q and k")
        experts = _on_input(experts_from_hf(reader, normalize=False))
        return cls.read_hf(
            reader,
            attention=AttentionConfig(
                _windows(reader, rotates), chunked=True, qk_norm=qk_norm, query_growth=_growth(reader)
            ),
            rope=replace(hf_rope(reader, theta=500_000.0), rotates=rotates),
            mlp=MLPConfig.from_hf(reader, experts, shared="plain"),
        )


def _on_input(routing: Routing | None) -> Routing | None:
    """Return the routing with its weights, the sigmoid of the router's output, applied to the experts' input rows."""
    return None if routing is None else replace(routing, scoring="sigmoid", normalize=False, on_input=True)


def _growth(reader: ConfigReader) -> QueryGrowth | None:
    """Return the growth of queries, or None if `attn_temperature_tuning` is off. Older files give a number there, not a
    boolean.
    """
    key = "attn_temperature_tuning"
    value = reader.value(key)
    factor = reader.number("attn_scale", _GROWTH, high=_MAX_GROWTH)
    floor = reader.integer("floor_scale", _FLOOR, low=_MIN_FLOOR)
    is_tuned = reader.integer(key, low=0) > 0 if type(value) is int else reader.flag(key, True)
    return QueryGrowth(factor, floor, 1) if is_tuned else None


def _windows(reader: ConfigReader, rotates: tuple[bool, ...]) -> Windows:
    kinds = ["chunked_attention" if rotating else "full_attention" for rotating in rotates]
    if reader.has("layer_types"):
        kinds = [*reader.texts("layer_types", len(rotates), ("chunked_attention", "full_attention"))]
    if "chunked_attention" not in kinds:
        return (None,) * len(kinds)
    length = reader.integer("attention_chunk_size", _CHUNK)
    return tuple(length if kind == "chunked_attention" else None for kind in kinds)


_MLP, _EXPERTS = "layers.*.mlp.", "layers.*.mlp.experts."
WEIGHTS = WeightTable(
    names={
        **{f"blk.*.ffn_{part}_shexp": f"{_MLP}shared_experts.{part}_proj" for part in ("gate", "up", "down")},
        **{f"layers.*.feed_forward.{part}_proj": f"{_MLP}{part}_proj" for part in ("gate", "up", "down")},
        **{
            f"layers.*.feed_forward.shared_expert.{part}_proj": f"{_MLP}shared_experts.{part}_proj"
            for part in ("gate", "up", "down")
        },
        **{
            f"layers.*.feed_forward.experts.*.{part}_proj": f"{_EXPERTS}*.{part}_proj"
            for part in ("gate", "up", "down")
        },
        "layers.*.feed_forward.router": _MLP + "gate",
        # Stacked experts are [in, out] and have no suffix.
        "layers.*.feed_forward.experts.gate_up_proj": _EXPERTS + "gate_up_columns.weight",
        "layers.*.feed_forward.experts.down_proj": _EXPERTS + "down_columns.weight",
    },
    transforms=(
        *rotary_pairs(),
        *fused_experts(lambda c: c.mlp.intermediate_size),
        *stacked_experts(),
    ),
)


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    return llama.build(g, cfg, _attention)


def _attention(g: Graph, x: Value, cfg: Config, layer: int) -> Value:
    """Build a layer's attention.

    The original applies its weightless norms after rotation; rotation keeps lengths, so here they come first.
    """
    p = f"layers.{layer}.self_attn."
    q, k, v = (g.linear(x, f"{p}{n}_proj") for n in "qkv")
    if (rope := cfg.rope_params(layer)) is not None:
        if cfg.attention.qk_norm:
            q, k = (g.rms_norm(y, None, cfg.norm_eps, cfg.head_dim) for y in (q, k))
        q, k = (g.add(Rope(y, cfg.head_dim, rope)) for y in (q, k))
    return g.linear(g.attention(q, k, v, cfg.attention_params(layer)), p + "o_proj")
