"""The image encoder of Pixtral, Mistral Small 3.x and Ministral 3: only rotary positions. arXiv 2410.07073."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.batch import Array
from octavo.graph.builder import Graph
from octavo.graph.ops.attention import RopeParams
from octavo.graph.ops.linear import Input
from octavo.graph.ops.rows import Gather
from octavo.graph.ops.rowwise import Activation, GatedActivation
from octavo.graph.patches import BLOCKS, PATCHES
from octavo.graph.values import Value
from octavo.image_layout import ImageTile
from octavo.models._reading import MAX_LAYERS, MAX_WIDTH, ConfigReader
from octavo.models._rope import base_frequencies
from octavo.models._weights import Permute, Transpose, Unfolded, WeightTable, halves_of_pairs
from octavo.models._wrapped import text_section
from octavo.models.towers._tower import (
    TowerConfig,
    TowerInputs,
    attention,
    gguf_sizes,
    last_layer_only,
    statistics,
    tile_rows,
)

MODEL_TYPES = ("mistral3", "llava")
PROJECTORS = ("pixtral",)

_NORM_EPS = 1e-5
_MERGER = "patch_merger.merging_layer"


def _by_patch(cfg: TowerConfig) -> NDArray[np.intp]:
    """Return the columns of the merger in patch order; files store them channel by channel."""
    count = cfg.merge_size**2
    order: NDArray[np.intp] = np.arange(cfg.hidden_size * count).reshape(cfg.hidden_size, count).T.reshape(-1)
    return order


def _by_half(cfg: TowerConfig) -> NDArray[np.intp]:
    return halves_of_pairs(cfg.num_heads, cfg.head_dim, cfg.head_dim)


_LAYER = "transformer.layers.*."
WEIGHTS = WeightTable(
    prefixes=(
        *("model.vision_tower.", "vision_tower."),
        *("model.multi_modal_projector.", "multi_modal_projector."),
    ),
    names={
        "v.patch_embd": "patch_conv",
        "v.pre_ln": "ln_pre",
        "v.blk.*.ln1": _LAYER + "attention_norm",
        "v.blk.*.ln2": _LAYER + "ffn_norm",
        **{f"v.blk.*.attn_{part}": f"{_LAYER}attention.{part}_proj" for part in "qkv"},
        "v.blk.*.attn_out": _LAYER + "attention.o_proj",
        **{f"v.blk.*.ffn_{part}": f"{_LAYER}feed_forward.{part}_proj" for part in ("gate", "up", "down")},
        "mm.1": "linear_1",
        "mm.2": "linear_2",
        "mm.input_norm": "norm",
        "mm.patch_merger": _MERGER,
    },
    transforms=(
        Unfolded("patch_conv", kernel=lambda cfg: cfg.kernel()),
        *(Transpose(_MERGER), Permute(_MERGER, _by_patch), Transpose(_MERGER)),
        *(Permute(f"{_LAYER}attention.{part}_proj", _by_half, "gguf") for part in "qk"),
    ),
)


@dataclass(frozen=True, slots=True)
class Config(TowerConfig):
    """Configuration of Pixtral's image encoder.

    theta: base of the rotary frequencies.
    text_eps: epsilon of the norm before the merger.
    """

    theta: float = 10000.0
    text_eps: float = 1e-5

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        vision, text = reader.section("vision_config"), text_section(reader)
        is_merged = reader.values.get("model_type") == "mistral3"
        patch = vision.integer("patch_size", 16, high=1 << 10)
        last_layer_only(reader, "vision_feature_layer")
        return cls(
            num_layers=vision.integer("num_hidden_layers", 24, high=MAX_LAYERS),
            hidden_size=vision.integer("hidden_size", 1024, high=MAX_WIDTH),
            num_heads=vision.integer("num_attention_heads", 16, high=MAX_WIDTH),
            patch_values=vision.integer("num_channels", 3, high=16) * patch * patch,
            merge_size=reader.integer("spatial_merge_size", 2, high=16) if is_merged else 1,
            output_width=text.integer("hidden_size", 4096, high=MAX_WIDTH),
            theta=vision.section("rope_parameters").number("rope_theta", vision.number("rope_theta", 10000.0)),
            text_eps=text.number("rms_norm_eps", 1e-5, high=1.0),
        )

    @classmethod
    def from_gguf(cls, reader: ConfigReader, text: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        return cls(
            **gguf_sizes(reader),
            merge_size=reader.integer("spatial_merge_size", 1, high=16),
            output_width=shapes["linear_2.weight"][0],
            text_eps=text.number("attention.layer_norm_rms_epsilon", 1e-5, high=1.0),
        )

    @classmethod
    def processor_settings(cls, reader: ConfigReader) -> tuple[str, Mapping[str, Any], Mapping[str, Any]]:
        vision = {"patch_size": reader.integer("patch_size", 16, high=1 << 10)}
        config = {"vision_config": vision, "spatial_merge_size": reader.integer("spatial_merge_size", 1, high=16)}
        longest = reader.integer("image_size", high=1 << 16)
        return "mistral3", config, {"size": {"longest_edge": longest}, **statistics(reader)}

    def inputs(self, tiles: Sequence[ImageTile], tables: Mapping[str, Array]) -> TowerInputs:
        del tables
        return TowerInputs((), tile_rows(tiles, self.merge_size))


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the rows [MERGED, output_width]."""
    h = g.linear(g.add(Input(0, PATCHES, cfg.patch_values)), "patch_conv")
    h = g.rms_norm(h, "ln_pre", _NORM_EPS)
    frequencies = base_frequencies(cfg.head_dim, cfg.theta)
    rows, cols = frequencies[::2].tolist(), frequencies[1::2].tolist()
    rope = RopeParams((*rows, *cols), axes=(0,) * len(rows) + (1,) * len(cols))
    for i in range(cfg.num_layers):
        stem = f"transformer.layers.{i}"
        x = g.rms_norm(h, f"{stem}.attention_norm", _NORM_EPS)
        h = h + g.linear(attention(g, x, cfg, f"{stem}.attention", rope), f"{stem}.attention.o_proj")
        x = g.rms_norm(h, f"{stem}.ffn_norm", _NORM_EPS)
        gate, up = (g.linear(x, f"{stem}.feed_forward.{part}_proj") for part in ("gate", "up"))
        h = h + g.linear(g.add(GatedActivation(gate, up, "silu")), f"{stem}.feed_forward.down_proj")
    if f"{_MERGER}.weight" in g.weights:
        h = g.rms_norm(h, "norm", cfg.text_eps)
        h = g.linear(g.add(Gather(h, BLOCKS, cfg.merge_size**2)), _MERGER)
    else:
        h = g.add(Gather(h, BLOCKS, 1))
    return g.linear(g.add(Activation(g.linear(h, "linear_1"), "gelu")), "linear_2")
