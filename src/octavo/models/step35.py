"""Step 3.5 and 3.7 Flash, text: gated heads, more heads in layers with a window, limited experts. StepFun, 2026."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from octavo.graph.builder import Graph
from octavo.graph.ops.attention import AttentionParams, Rope
from octavo.graph.ops.moe import Routing
from octavo.graph.ops.rowwise import Activation, Clip
from octavo.graph.values import Value
from octavo.models import llama
from octavo.models._attention import (
    AttentionConfig,
    Windows,
    heads_by_kind,
    windows_from_gguf,
    windows_of_types,
)
from octavo.models._decoder import DecoderConfig, checked_columns, hf_rope
from octavo.models._heads import without_heads
from octavo.models._layers import gated_mlp
from octavo.models._mlp import MLPConfig
from octavo.models._reading import MAX_LAYERS, MAX_WIDTH, ConfigReader
from octavo.models._rope import RopeConfig, rope_from_gguf
from octavo.models._weights import Fold, WeightTable, shared_expert_names

ALIASES = ("step3p5",)

# Keys of the authors and the usual ones.
_KEYS = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "max_seq_len": "max_position_embeddings",
    "share_expert_dims": "share_expert_dim",
}
# Switches of the authors that transformers does not read, and what it does.
_FIXED = {
    "use_head_wise_attn_gate": True,
    "use_qk_norm": True,
    "norm_expert_weight": True,
    "zero_centered": True,
    "sink": False,
    "use_mfa": False,
    "use_bidirectional_attention": False,
}
_FACTORS = "rope_freqs.weight"
_KINDS = ("full_attention", "sliding_attention")
_NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
_MOE, _SHARED, _PARTS = "layers.*.moe.", "layers.*.share_expert.", ("gate", "up", "down")

WEIGHTS = WeightTable(
    names={
        **shared_expert_names(),
        "blk.*.attn_gate": "layers.*.self_attn.g_proj",
        _MOE + "gate": "layers.*.mlp.gate",
        _MOE + "router_bias": "layers.*.mlp.gate.e_score_correction.bias",
        **{f"{_MOE}{part}_proj": f"layers.*.mlp.experts.{part}_proj" for part in _PARTS},
        **{f"{_SHARED}{part}_proj": f"layers.*.mlp.shared_experts.{part}_proj" for part in _PARTS},
    },
    transforms=tuple(Fold(stem, 1.0, "safetensors") for stem in (*(f"layers.*.{norm}" for norm in _NORMS), "norm")),
)

Limits = tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Step 3.5's configuration. Multi-token-prediction (MTP) layers are not used.

    num_heads: number of heads in layers without a window.
    local_heads: number of heads in layers with a window.
    limits: limit of each layer's experts, or None for no limit.
    shared_limits: limit of each layer's MLP, or of its shared expert.
    """

    local_heads: int = 1
    limits: Limits = ()
    shared_limits: Limits = ()

    def attention_params(self, layer: int) -> AttentionParams:
        params = DecoderConfig.attention_params(self, layer)
        return params if params.window is None else replace(params, num_heads=self.local_heads)

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        reader = without_heads(reader)
        num_layers = reader.integer("block_count", high=MAX_LAYERS)
        for key in ("attention.head_count", "attention.head_count_kv"):
            reader = reader.replaced(key, _by_layer(reader, key, num_layers))
        local = np.any(_by_layer(reader, "attention.sliding_window_pattern", num_layers))
        windows = windows_from_gguf(reader, 1, reader.integer("attention.sliding_window") if local else None)
        heads, num_heads = heads_by_kind(reader, "attention.head_count", windows)
        reader = reader.replaced("attention.head_count", num_heads)
        plain = cls.read_gguf(
            reader,
            shapes,
            attention=AttentionConfig(windows, qk_norm=True),
            rope=_gguf_rope(reader),
            mlp=MLPConfig.from_gguf(reader, _gguf_routing(reader), shared="plain"),
        )
        limits, shared = (_limits(reader, f"swiglu_clamp_{part}", num_layers) for part in ("exp", "shexp"))
        return plain._with(reader, "attention.head_count", heads, limits, shared)

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        reader = usual(reader)
        num_layers = reader.integer("num_hidden_layers", high=MAX_LAYERS)
        windows = _windows(reader, num_layers)
        unlisted = reader.replaced("rope_theta", None)
        full, local = (hf_rope(unlisted, section) for section in rope_sections(reader, windows))
        count, head_dim = reader.integer("n_routed_experts"), reader.integer("head_dim", high=MAX_WIDTH)
        experts = Routing(
            reader.integer("num_experts_per_tok", high=count),
            "sigmoid",
            scale=reader.number("moe_router_scaling_factor", 1.0),
        )
        divisor = reader.number("query_pre_attn_scalar", float(head_dim))
        plain = cls.read_hf(
            reader,
            attention=AttentionConfig(windows, qk_norm=True, scale=None if divisor == head_dim else divisor**-0.5),
            rope=replace(full, local=local.params),
            mlp=MLPConfig.from_hf(reader, experts, shared="plain"),
        )
        limits, shared = (_limits(reader, f"swiglu_limits{part}", num_layers) for part in ("", "_shared"))
        return plain._with(reader, "num_sliding_attention_heads", _local_heads(reader), limits, shared)

    def _with(self, reader: ConfigReader, key: str, local_heads: int, limits: Limits, shared: Limits) -> Config:
        """Return the configuration with these fields, checked.

        key: the key of `local_heads`.
        """
        if not any(self.attention.windows):
            local_heads = self.num_heads
        if local_heads % self.num_kv_heads:
            raise reader.error(key, local_heads, f"must be a multiple of {self.num_kv_heads} kv heads")
        checked_columns(reader, "head_dim", self.head_dim, local_heads)
        return replace(self, local_heads=local_heads, limits=limits, shared_limits=shared)


def usual(reader: ConfigReader) -> ConfigReader:
    """Return the configuration with its keys renamed to the usual ones. Raises ModelLoadError if the graph does not
    support it.
    """
    for key, value in _FIXED.items():
        if reader.flag(key, value) != value:
            raise reader.error(key, not value, f"must be {str(value).lower()}")
    if reader.value("gating") not in (None, True, "per-head"):
        raise reader.error("gating", reader.value("gating"), "must be per-head")
    if reader.text("moe_router_activation", "sigmoid") != "sigmoid":
        raise reader.error("moe_router_activation", reader.text("moe_router_activation"), "must be sigmoid")
    for key, kinds in (("use_rope_layers", [True]), ("yarn_only_types", [_KINDS[0]])):
        listed = reader.value(key) or []
        if not isinstance(listed, list) or any(kind not in kinds for kind in listed):
            raise reader.error(key, listed, f"must be empty or {str(kinds[0]).lower()} alone")
    return reader.renamed(_KEYS).with_defaults({"head_dim": 128, "rms_norm_eps": 1e-5})


def _windows(reader: ConfigReader, num_layers: int) -> Windows:
    if not reader.has("layer_types"):
        return (None,) * num_layers
    kinds = _by_layer(reader, "layer_types", num_layers)
    window = reader.integer("sliding_window") if _KINDS[1] in kinds else None
    return windows_of_types(reader.replaced("layer_types", kinds), num_layers, window)


def _by_layer(reader: ConfigReader, key: str, num_layers: int) -> Any:
    """Return the value, or a list cut to the number of layers: published lists also have entries for MTP layers."""
    value = reader.value(key)
    if not isinstance(value, (list, tuple, np.ndarray)):
        return value
    if len(value) < num_layers:
        raise reader.error(key, value, f"must have {num_layers} values")
    return value[:num_layers]


def _limits(reader: ConfigReader, key: str, num_layers: int) -> Limits:
    """Return the limits, with None in place of 0 and null."""
    values = _by_layer(reader, key, num_layers)
    if not isinstance(values, (list, tuple, np.ndarray)):
        values = [values] * num_layers
    numbers = ConfigReader({f"{reader.prefix}{key}[{i}]": value or None for i, value in enumerate(values)})
    return tuple(numbers.optional_number(name) for name in numbers.values)


def rope_sections(reader: ConfigReader, windows: Windows) -> tuple[ConfigReader, ConfigReader]:
    """Return the parts of config.json about the rotary embedding of layers without a window, and of layers with one.

    transformers writes one section for each kind of layer. The authors' files have lists by layer, and their scaling
    applies only to layers without a window.
    """
    ropes, scaling = reader.section("rope_parameters"), reader.section("rope_scaling")
    sections = []
    for kind, section in zip(_KINDS, (scaling, ConfigReader({}, "rope_parameters.")), strict=True):
        if ropes.has(kind):
            sections.append(ropes.section(kind))
            continue
        layer = next((i for i, window in enumerate(windows) if (window is None) == (kind == _KINDS[0])), 0)
        keys = {"rope_theta": "rope_theta", "partial_rotary_factors": "partial_rotary_factor"}
        listed = {new: _by_layer(reader, old, len(windows)) for old, new in keys.items() if reader.has(old)}
        own = {key: value[layer] if isinstance(value, list) else value for key, value in listed.items()}
        sections.append(section.with_defaults({"rope_theta": 1e4, **own}))
    return sections[0], sections[1]


def _local_heads(reader: ConfigReader) -> int:
    """Return the number of heads in layers with a window. Raises ModelLoadError if anything else about their heads
    differs from the other layers.
    """
    other = reader.section("attention_other_setting")
    for key, usual_key in (("num_attention_groups", "num_key_value_heads"), ("head_dim", "head_dim")):
        value = reader.integer(usual_key)
        if other.integer(key, value) != value:
            raise other.error(key, other.integer(key), f"must be {value}, as in the other layers")
    heads = other.integer("num_attention_heads", reader.integer("num_attention_heads"), high=MAX_WIDTH)
    return reader.integer("num_sliding_attention_heads", heads, high=MAX_WIDTH)


def _gguf_routing(reader: ConfigReader) -> Routing:
    count = reader.integer("expert_count")
    if reader.integer("expert_gating_func", 2) != 2:
        raise reader.error("expert_gating_func", reader.integer("expert_gating_func"), "must be 2 (sigmoid)")
    return Routing(
        reader.integer("expert_used_count", high=count),
        "sigmoid",
        reader.flag("expert_weights_norm", True),
        reader.number("expert_weights_scale", 1.0),
    )


def _gguf_rope(reader: ConfigReader) -> RopeConfig:
    """Read the rotary embedding of a GGUF file.

    In layers without a window, half of the file's columns rotate, with the first half of its factors.
    """
    if reader.text("rope.scaling.type", "none") != "none":
        raise reader.error("rope.scaling.type", reader.text("rope.scaling.type"), "must be none")
    head_dim, length = reader.integer("attention.key_length", low=2, high=MAX_WIDTH), reader.integer("context_length")
    columns = reader.integer("rope.dimension_count", head_dim, low=4, high=head_dim)
    full = reader.replaced("rope.dimension_count", columns // 2)
    if isinstance(factors := reader.values.get(_FACTORS), np.ndarray):
        full = ConfigReader({**full.values, _FACTORS: factors[: columns // 4]}, full.prefix)
    own = {key: reader.value(f"{key}_swa") for key in ("rope.dimension_count", "rope.freq_base")}
    local = {key: value for key, value in reader.values.items() if key != _FACTORS}
    local |= {reader.prefix + key: value for key, value in own.items() if value is not None}
    return RopeConfig(
        rope_from_gguf(full, head_dim, length),
        local=rope_from_gguf(ConfigReader(local, reader.prefix), head_dim, length),
    )


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    return llama.build(g, cfg, _attention, _mlp)


def _attention(g: Graph, x: Value, cfg: Config, layer: int) -> Value:
    """Build attention in which a sigmoid gate multiplies the output of each head."""
    p, rope = f"layers.{layer}.self_attn.", cfg.rope_params(layer)
    assert rope is not None
    q, k, v, gate = (g.linear(x, f"{p}{n}_proj") for n in "qkvg")
    q, k = (g.rms_norm(y, f"{p}{n}_norm", cfg.norm_eps) for n, y in (("q", q), ("k", k)))
    q, k = (g.add(Rope(y, cfg.head_dim, rope)) for y in (q, k))
    mixed = g.attention(q, k, v, cfg.attention_params(layer))
    return g.linear(mixed * g.add(Activation(gate, "sigmoid")), p + "o_proj")


def _mlp(g: Graph, x: Value, cfg: Config, layer: int) -> Value:
    """Build a layer's MLP or, if the layer has a router, its experts and a shared expert."""
    stem, experts = f"layers.{layer}.mlp", cfg.mlp.experts
    assert experts is not None
    if f"{stem}.gate.weight" not in g.weights:
        return _limited_mlp(g, x, stem, cfg.shared_limits[layer])
    routed = g.moe(x, stem, experts, limit=cfg.limits[layer], limits_activated=True)
    return routed + _limited_mlp(g, x, f"{stem}.shared_experts", cfg.shared_limits[layer])


def _limited_mlp(g: Graph, x: Value, stem: str, limit: float | None) -> Value:
    """Build a gated MLP.

    limit: maximum of the activated gate, and of the magnitude of up; None means that there is none.
    """
    if limit is None:
        return gated_mlp(g, x, stem)
    gate, up = (g.linear(x, f"{stem}.{n}_proj") for n in ("gate", "up"))
    gate = g.add(Clip(g.add(Activation(gate, "silu")), -math.inf, limit))
    return g.linear(gate * g.add(Clip(up, -limit, limit)), f"{stem}.down_proj")
