"""MiMo V2 Flash: most layers have windows with sinks and twice the kv heads; scaled values, experts. Xiaomi, 2025."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.graph.builder import Graph
from octavo.graph.ops.attention import AttentionParams, Rope
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
from octavo.models._mlp import MLPConfig
from octavo.models._reading import MAX_LAYERS, MAX_WIDTH, ConfigReader
from octavo.models._rope import rope_from_gguf
from octavo.models._routing import grouped_from_gguf, grouped_from_hf
from octavo.models._weights import WeightTable, shared_expert_names, stacked_experts

ALIASES = ("mimo2",)

WEIGHTS = WeightTable(
    names={
        **shared_expert_names(),
        "blk.*.attn_sinks.weight": "layers.*.self_attn.sinks.weight",
        "layers.*.self_attn.attention_sink_bias": "layers.*.self_attn.sinks.weight",
        "layers.*.self_attn.sinks": "layers.*.self_attn.sinks.weight",
    },
    transforms=stacked_experts(),
)
_SHARE, THETA, _LOCAL_THETA = 0.334, 5e6, 1e4


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """MiMo V2 Flash's configuration. Multi-token-prediction (MTP) layers are not used.

    num_kv_heads: number of kv heads in the layers without a window.
    """

    local_kv_heads: int = 1
    value_scale: float = 1.0

    def attention_params(self, layer: int) -> AttentionParams:
        params = DecoderConfig.attention_params(self, layer)
        return params if params.window is None else replace(params, num_kv_heads=self.local_kv_heads)

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        reader = without_heads(reader)
        num_layers = reader.integer("block_count", high=MAX_LAYERS)
        windows = windows_from_gguf(reader, 6, reader.integer("attention.sliding_window"))
        local_heads, heads = heads_by_kind(reader, "attention.head_count_kv", windows)
        plain = cls.read_gguf(
            reader.with_largest("attention.head_count_kv", num_layers),
            shapes,
            attention=AttentionConfig(windows, sinks=True),
            mlp=MLPConfig.from_gguf(reader, grouped_from_gguf(reader, shapes)),
            value_scale=reader.number("attention.value_scale", 1.0),
        )
        own = reader.replaced("rope.freq_base", reader.number("rope.freq_base_swa", _LOCAL_THETA, low=1.0))
        local = rope_from_gguf(own, plain.head_dim, plain.max_position_embeddings)
        rope = replace(plain.rope, local=local)
        return replace(plain, num_kv_heads=heads, local_kv_heads=local_heads, rope=rope)

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        num_layers = reader.integer("num_hidden_layers", high=MAX_LAYERS)
        head_dim = reader.integer("head_dim", 192, low=2, high=MAX_WIDTH)
        eps = reader.number("layernorm_epsilon", 1e-5, high=1.0)
        reader = reader.with_defaults({"head_dim": head_dim, "rms_norm_eps": eps, "n_group": 1, "topk_group": 1})
        if not reader.has("routed_scaling_factor"):
            reader = reader.replaced("routed_scaling_factor", 1.0)
        full, local = (hf_rope(reader, section) for section in rope_sections(reader, head_dim))
        plain = cls.read_hf(
            reader,
            attention=AttentionConfig(_windows(reader, num_layers), sinks=True),
            rope=replace(full, local=local.params),
            mlp=MLPConfig.from_hf(reader, grouped_from_hf(reader)),
            value_scale=reader.number("attention_value_scale", 1.0),
        )
        value_dim = reader.integer("v_head_dim", 128, high=MAX_WIDTH)
        kv_heads = reader.integer("swa_num_key_value_heads", 2 * plain.num_kv_heads, high=plain.num_heads)
        if plain.num_heads % kv_heads:
            raise reader.error("swa_num_key_value_heads", kv_heads, f"does not divide {plain.num_heads} heads")
        for key, value in (("swa_num_attention_heads", plain.num_heads), ("swa_head_dim", head_dim)):
            if reader.integer(key, value) != value:
                raise reader.error(key, reader.integer(key), f"must be {value}, as in the other layers")
        value_dim = checked_columns(reader, "v_head_dim", value_dim, plain.num_heads)
        return replace(plain, value_dim=value_dim, local_kv_heads=kv_heads)


def rope_sections(reader: ConfigReader, head_dim: int) -> tuple[ConfigReader, ConfigReader]:
    """Return the parts of config.json about the rotary embedding of layers without a window, and of layers with one."""
    ropes = reader.section("rope_parameters")
    share = reader.number("partial_rotary_factor", _SHARE, high=1.0)
    full = reader.number("rope_theta", THETA, low=1.0)
    local = reader.number("swa_rope_theta", _LOCAL_THETA, low=1.0)
    return (
        _in_pairs(ropes.section("full_attention"), head_dim, share, full),
        _in_pairs(ropes.section("sliding_attention"), head_dim, share, local),
    )


def _in_pairs(section: ConfigReader, head_dim: int, share: float, theta: float) -> ConfigReader:
    """Return the section with its rotary share rounded down to a whole number of columns.

    With the share in the published files, the number of columns would not be whole.
    """
    section = section.with_defaults({"partial_rotary_factor": share, "rope_theta": theta})
    columns = int(head_dim * section.number("partial_rotary_factor", high=1.0))
    return section.replaced("partial_rotary_factor", columns / head_dim)


def _windows(reader: ConfigReader, num_layers: int) -> Windows:
    """Read the windows from transformers' `layer_types` or the authors' `hybrid_layer_pattern`.

    The authors' key for the length, `sliding_window_size`, gives one token less than the window has here.
    """
    key = "sliding_window_size" if reader.has("sliding_window_size") else "sliding_window"
    window = reader.integer(key, 128 if key == "sliding_window_size" else 129) + (key == "sliding_window_size")
    if reader.has("hybrid_layer_pattern"):
        return tuple(window if local else None for local in reader.flags("hybrid_layer_pattern", num_layers))
    if reader.has("layer_types"):
        return windows_of_types(reader, num_layers, window)
    return tuple(None if layer == 0 or (layer + 1) % 6 == 0 else window for layer in range(num_layers))


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    return llama.build(g, cfg, _attention)


def _attention(g: Graph, x: Value, cfg: Config, layer: int) -> Value:
    """Build a layer's attention, with sinks if its weights include them."""
    p, rope = f"layers.{layer}.self_attn.", cfg.rope_params(layer)
    assert rope is not None
    q, k, v = (g.linear(x, f"{p}{n}_proj") for n in "qkv")
    q, k = (g.add(Rope(y, cfg.head_dim, rope)) for y in (q, k))
    sinks = p + "sinks.weight" if p + "sinks.weight" in g.weights else None
    return g.linear(g.attention(q, k, v * cfg.value_scale, cfg.attention_params(layer), sinks), p + "o_proj")
