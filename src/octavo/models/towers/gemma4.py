"""Gemma 4's image encoders: layers with norms on both sides, or in the unified form only a projection.

In small models the inputs and outputs of linears are clamped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.batch import Array, Float32
from octavo.graph.builder import Graph
from octavo.graph.ops.attention import Rope, RopeParams
from octavo.graph.ops.encoder import EncoderAttention, EncoderAttentionParams
from octavo.graph.ops.linear import Input
from octavo.graph.ops.rows import Gather, PoolRows
from octavo.graph.ops.rowwise import Clip, GatedActivation
from octavo.graph.patches import BLOCKS, MERGED, PATCHES
from octavo.graph.spans import READS_ONLY, Sight
from octavo.graph.values import Value
from octavo.image_layout import ImageTile
from octavo.models._reading import MAX_LAYERS, MAX_WIDTH, ConfigReader
from octavo.models._rope import base_frequencies
from octavo.models._weights import Permute, Unfolded, WeightTable
from octavo.models._wrapped import text_section
from octavo.models.towers._tower import TowerConfig, TowerInputs, gguf_sizes, projector_type, tile_rows

MODEL_TYPES = ("gemma4", "gemma4_unified")
PROJECTORS = ("gemma4v", "gemma4uv")

_MOST_TOKENS = 1120  # per image, with the largest budget
_LAYER_NORM_EPS = 1e-5
_TABLE, _BIAS, _SCALE = "places.weight", "std.bias", "std.weight"
_LAYER = "encoder.layers.*."
_PRODUCTS = {
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_out",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}  # those of a layer, with their names in GGUF files
_NORMS = {
    "input_layernorm": "ln1",
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ffn_post_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
_UNBOUNDED = (-math.inf, math.inf) * 2
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


def _by_halves(count: int, head_dim: int) -> NDArray[np.intp]:
    """Return the rows of q or k so that two separately rotated halves become the halves of one whole head."""
    quarters = np.arange(count * head_dim).reshape(count, 4, head_dim // 4)
    return quarters[:, [0, 2, 1, 3]].reshape(-1)


WEIGHTS = WeightTable(
    prefixes=("model.vision_tower.", "model.embed_vision.", "model.vision_embedder."),
    names={
        # safetensors
        **{f"{_LAYER}{stem}.linear": _LAYER + stem for stem in _PRODUCTS},
        **{f"{_LAYER}{stem}.{bound}": f"{_LAYER}{stem}.{bound}.weight" for stem in _PRODUCTS for bound in _BOUNDS},
        "patch_embedder.input_proj": "patch_dense",
        "patch_embedder.position_embedding_table": _TABLE,
        "std_bias": _BIAS,
        "std_scale": _SCALE,
        "pos_embedding": _TABLE,
        "multimodal_embedder.embedding_projection": "embedding_projection",
        # GGUF
        **{f"v.blk.*.{stored}": _LAYER + stem for stem, stored in {**_PRODUCTS, **_NORMS}.items()},
        **{
            f"v.blk.*.{stored}.{bound}": f"{_LAYER}{stem}.{bound}.weight"
            for stem, stored in _PRODUCTS.items()
            for bound in _BOUNDS
        },
        "v.patch_embd": "patch_dense",
        "v.position_embd": "places",
        "v.std_bias": _BIAS,
        "v.std_scale": _SCALE,
        "v.patch_norm.1": "patch_ln1",
        "v.patch_norm.2": "patch_ln2",
        "v.patch_norm.3": "pos_norm",
        "mm.input_projection": "embedding_projection",
    },
    transforms=(
        Unfolded("patch_dense", "gguf", kernel=lambda c: c.kernel() if c.num_layers else ()),
        *(Permute(f"{_LAYER}self_attn.{part}_proj", lambda c: _by_halves(c.num_heads, c.head_dim)) for part in "qk"),
        *(Permute(f"{_LAYER}self_attn.{part}_norm", lambda c: _by_halves(1, c.head_dim)) for part in "qk"),
    ),
)


_SEES_WINDOWS = Sight(both_ways=_MOST_TOKENS, only_windows=True)


@dataclass(frozen=True, slots=True)
class Config(TowerConfig):
    """Configuration of Gemma 4's image encoders.

    num_layers: 0 for the unified form.
    is_standard: rows are shifted and scaled.
    is_planar: the file is GGUF and stores the values of a patch colour by colour.
    bounds: minimum and maximum of each linear's input and output, by name.
    """

    norm_eps: float = 1e-6
    theta: float = 100.0
    is_standard: bool = False
    is_planar: bool = False
    bounds: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        vision, text = reader.section("vision_config"), text_section(reader)
        is_unified = reader.values.get("model_type") == "gemma4_unified"
        patch, merge = vision.integer("patch_size", 16, high=1 << 10), vision.integer("pooling_kernel_size", 3, high=16)
        width = vision.integer("mm_embed_dim", 3840, high=MAX_WIDTH)
        heads = 1
        if not is_unified:
            width = vision.integer("hidden_size", 768, high=MAX_WIDTH)
            heads = vision.integer("num_attention_heads", 12, high=MAX_WIDTH)
            for key, needed in (("head_dim", width // heads), ("num_key_value_heads", heads)):
                if vision.integer(key, needed) != needed:
                    raise vision.error(key, vision.integer(key, needed), f"must be {needed}")
        is_standard = not is_unified and vision.flag("standardize", False)
        both_ways = text.values.get(text.prefix + "use_bidirectional_attention") == "vision"
        return cls(
            num_layers=0 if is_unified else vision.integer("num_hidden_layers", 16, high=MAX_LAYERS),
            hidden_size=width,
            num_heads=heads,
            patch_values=3 * (patch * merge if is_unified else patch) ** 2,
            merge_size=1 if is_unified else merge,
            output_width=text.integer("hidden_size", 2304, high=MAX_WIDTH),
            sight=_SEES_WINDOWS if both_ways else READS_ONLY,
            host_tables=(_TABLE, _BIAS, _SCALE) if is_standard else (_TABLE,),
            norm_eps=vision.number("rms_norm_eps", 1e-6, high=1.0),
            theta=vision.section("rope_parameters").number("rope_theta", 100.0),
            is_standard=is_standard,
        )

    @classmethod
    def from_gguf(cls, reader: ConfigReader, text: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        is_unified, is_standard = _is_unified(reader), _BIAS in shapes
        sizes = gguf_sizes(reader, low=0 if is_unified else 1)
        merge = reader.integer("projector.scale_factor", 3, high=16)
        if is_unified:
            sizes |= {"num_heads": 1, "patch_values": sizes["patch_values"] * merge**2}
        # Not given in files: in models with per-layer inputs, no token sees a later one.
        is_causal = text.integer("embedding_length_per_layer_input", 0, low=0) > 0
        return cls(
            merge_size=1 if is_unified else merge,
            output_width=shapes["embedding_projection.weight"][0],
            sight=READS_ONLY if is_causal else _SEES_WINDOWS,
            host_tables=(_TABLE, _BIAS, _SCALE) if is_standard else (_TABLE,),
            norm_eps=reader.number("attention.layer_norm_epsilon", 1e-6, high=1.0),
            is_standard=is_standard,
            is_planar=True,
            **sizes,
        )

    @classmethod
    def processor_settings(cls, reader: ConfigReader) -> tuple[str, Mapping[str, Any], Mapping[str, Any]]:
        sides = {
            "patch_size": reader.integer("patch_size", 16, high=1 << 10),
            "pooling_kernel_size": reader.integer("projector.scale_factor", 3, high=16),
        }
        return "gemma4_unified" if _is_unified(reader) else "gemma4", {}, sides

    def with_numbers(self, numbers: Mapping[str, float]) -> Config:
        stems = {name.rsplit(".", 2)[0] for name in numbers if name.removesuffix(".weight").endswith(_BOUNDS)}
        ends = list(zip(_BOUNDS, _UNBOUNDED, strict=True))
        return replace(
            self,
            bounds={stem: tuple(numbers.get(f"{stem}.{bound}.weight", end) for bound, end in ends) for stem in stems},
        )

    def patches(self, rows: Float32) -> Float32:
        if self.is_planar:
            rows = rows.reshape(len(rows), -1, 3).swapaxes(1, 2).reshape(rows.shape)
        return 2 * (rows - np.float32(0.5)) if self.num_layers else rows

    def inputs(self, tiles: Sequence[ImageTile], tables: Mapping[str, Array]) -> TowerInputs:
        table = tables[_TABLE].astype(np.float32)
        if not self.num_layers and not self.is_planar:
            table = table.swapaxes(0, 1)
        domains = tile_rows(tiles, self.merge_size)
        places = domains[PATCHES.name].positions
        assert places is not None
        inputs = [table[0][places[1]] + table[1][places[0]]]
        if self.is_standard:
            shift = -tables[_BIAS].astype(np.float32) * tables[_SCALE].astype(np.float32)
            inputs.append(np.tile(shift, (domains[MERGED.name].count, 1)))
        return TowerInputs(tuple(inputs), domains)


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the rows [MERGED, output_width]."""
    x, places = g.add(Input(0, PATCHES, cfg.patch_values)), Input(1, PATCHES, cfg.hidden_size)
    if not cfg.num_layers:
        x = g.linear(g.layer_norm(x, "patch_ln1", _LAYER_NORM_EPS), "patch_dense")
        x = g.layer_norm(x, "patch_ln2", _LAYER_NORM_EPS) + g.add(places)
        x = g.add(Gather(g.layer_norm(x, "pos_norm", _LAYER_NORM_EPS), BLOCKS))
        return g.linear(g.rms_norm(x, None, cfg.norm_eps, cfg.hidden_size), "embedding_projection")
    h = g.linear(x, "patch_dense") + g.add(places)
    half = base_frequencies(cfg.head_dim // 2, cfg.theta).tolist()
    rope = RopeParams((*half, *half), axes=(1,) * len(half) + (0,) * len(half))
    for i in range(cfg.num_layers):
        stem = f"encoder.layers.{i}"
        x = _attention(g, cfg, g.rms_norm(h, f"{stem}.input_layernorm", cfg.norm_eps), f"{stem}.self_attn", rope)
        h = h + g.rms_norm(x, f"{stem}.post_attention_layernorm", cfg.norm_eps)
        x = g.rms_norm(h, f"{stem}.pre_feedforward_layernorm", cfg.norm_eps)
        gate, up = _products(g, cfg, x, *(f"{stem}.mlp.{part}_proj" for part in ("gate", "up")))
        (x,) = _products(g, cfg, g.add(GatedActivation(gate, up, "gelu_tanh")), f"{stem}.mlp.down_proj")
        h = h + g.rms_norm(x, f"{stem}.post_feedforward_layernorm", cfg.norm_eps)
    x = g.times(g.add(PoolRows(h, BLOCKS, cfg.merge_size**2)), math.sqrt(cfg.hidden_size))
    if cfg.is_standard:
        x = g.scale_columns(x, "std") + g.add(Input(2, MERGED, cfg.hidden_size))
    return g.linear(g.rms_norm(x, None, cfg.norm_eps, cfg.hidden_size), "embedding_projection")


def _attention(g: Graph, cfg: Config, x: Value, stem: str, rope: RopeParams) -> Value:
    q, k, v = _products(g, cfg, x, *(f"{stem}.{part}_proj" for part in "qkv"))
    q, k = (g.rms_norm(y, f"{stem}.{part}_norm", cfg.norm_eps) for y, part in ((q, "q"), (k, "k")))
    q, k = (g.add(Rope(y, cfg.head_dim, rope)) for y in (q, k))
    v = g.rms_norm(v, None, cfg.norm_eps, cfg.head_dim)
    heads = EncoderAttentionParams(cfg.num_heads, cfg.num_heads, cfg.head_dim, 1.0)
    return _products(g, cfg, g.add(EncoderAttention(q, k, v, heads)), f"{stem}.o_proj")[0]


def _products(g: Graph, cfg: Config, x: Value, *stems: str) -> list[Value]:
    """Apply linears to x, each within its bounds. Linears with the same input bounds share the clamped input."""
    inputs: dict[tuple[float, ...], Value] = {}
    products = []
    for stem in stems:
        bounds = cfg.bounds.get(stem, _UNBOUNDED)
        if bounds[:2] not in inputs:
            inputs[bounds[:2]] = _clipped(g, x, *bounds[:2])
        products.append(_clipped(g, g.linear(inputs[bounds[:2]], stem), *bounds[2:]))
    return products


def _clipped(g: Graph, x: Value, low: float, high: float) -> Value:
    return x if (low, high) == _UNBOUNDED[:2] else g.add(Clip(x, low, high))


def _is_unified(reader: ConfigReader) -> bool:
    """Return True if an mmproj file has the unified form.

    reader: metadata of the file.
    """
    return bool(projector_type(reader.values) == "gemma4uv")
