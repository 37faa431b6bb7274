"""The image encoder of Qwen 3 VL, and of Qwen 3.5 without DeepStack: learned and rotary positions. arXiv 2511.21631."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.batch import Array
from octavo.graph.builder import Graph
from octavo.graph.ops.linear import Input
from octavo.graph.ops.rows import Gather
from octavo.graph.ops.rowwise import Activation
from octavo.graph.ops.streams import SideBySide
from octavo.graph.patches import BLOCKS, PATCHES
from octavo.graph.spans import Sight
from octavo.graph.values import Value
from octavo.image_layout import ImageTile
from octavo.models._reading import MAX_LAYERS, MAX_WIDTH, ConfigReader
from octavo.models._rope import rope_section
from octavo.models._weights import WeightTable
from octavo.models._wrapped import text_section
from octavo.models.towers._tower import (
    QWEN_NAMES,
    QWEN_QKV,
    QWEN_UNFOLDED,
    TowerConfig,
    TowerInputs,
    attention,
    bilinear,
    in_blocks,
    layer_numbers,
    plane_rope,
    qwen_pixels,
    read_activation,
    square_side,
    statistics,
    tile_rows,
)

MODEL_TYPES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
PROJECTORS = ("qwen3vl_merger",)

_NORM_EPS = 1e-6
_TABLE = "pos_embed.weight"
WEIGHTS = WeightTable(
    prefixes=("model.visual.", "visual."),
    names={
        # GGUF
        **QWEN_NAMES,
        "v.position_embd": "pos_embed",
        "v.post_ln": "merger.norm",
        "mm.0": "merger.linear_fc1",
        "mm.2": "merger.linear_fc2",
        "v.blk.*.ffn_up": "blocks.*.mlp.linear_fc1",
        "v.blk.*.ffn_down": "blocks.*.mlp.linear_fc2",
        "v.deepstack.*.norm": "deepstack.*.norm",
        "v.deepstack.*.fc1": "deepstack.*.linear_fc1",
        "v.deepstack.*.fc2": "deepstack.*.linear_fc2",
        # safetensors
        "deepstack_merger_list.*.norm": "deepstack.*.norm",
        "deepstack_merger_list.*.linear_fc1": "deepstack.*.linear_fc1",
        "deepstack_merger_list.*.linear_fc2": "deepstack.*.linear_fc2",
    },
    transforms=(QWEN_UNFOLDED, QWEN_QKV),
)


@dataclass(frozen=True, slots=True)
class Config(TowerConfig):
    """Configuration of Qwen 3 VL's image encoder.

    table_side: side of the square table of learned position embeddings.
    deepstack: layers after which features are taken, with the numbers of their mergers.
    """

    activation: str = "gelu_tanh"
    table_side: int = 48
    deepstack: tuple[tuple[int, int], ...] = ()

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        vision, text = reader.section("vision_config"), text_section(reader)
        layers = layer_numbers(vision, "deepstack_visual_indexes")
        patch, frames = vision.integer("patch_size", 16), vision.integer("temporal_patch_size", 2, high=16)
        count = vision.integer("num_position_embeddings", 2304, high=MAX_WIDTH)
        return cls(
            num_layers=vision.integer("depth", 27, high=MAX_LAYERS),
            hidden_size=vision.integer("hidden_size", 1152, high=MAX_WIDTH),
            num_heads=vision.integer("num_heads", 16, high=MAX_WIDTH),
            patch_values=vision.integer("in_channels", 3, high=16) * frames * patch * patch,
            merge_size=vision.integer("spatial_merge_size", 2, high=16),
            output_width=vision.integer("out_hidden_size", 3584, high=MAX_WIDTH) * (1 + len(layers)),
            sight=Sight(_axes_from_hf(text), len(layers)),
            host_tables=(_TABLE,),
            activation=read_activation(vision),
            table_side=square_side(vision, "num_position_embeddings", count),
            deepstack=tuple((layer, number) for number, layer in enumerate(layers)),
        )

    @classmethod
    def from_gguf(cls, reader: ConfigReader, text: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        num_layers = reader.integer("block_count", high=MAX_LAYERS)
        flags = reader.flags("is_deepstack_layers", num_layers) if reader.has("is_deepstack_layers") else ()
        layers = [layer for layer, has_features in enumerate(flags) if has_features]
        patch = reader.integer("patch_size", 16, high=1 << 10)
        key_length = text.integer("attention.key_length", high=MAX_WIDTH)
        rotary = text.integer("rope.dimension_count", key_length, high=MAX_WIDTH) // 2
        sections = text.counts("rope.dimension_sections", 4)[:3]
        return cls(
            num_layers=num_layers,
            hidden_size=reader.integer("embedding_length", high=MAX_WIDTH),
            num_heads=reader.integer("attention.head_count", high=MAX_WIDTH),
            patch_values=3 * 2 * patch * patch,
            merge_size=reader.integer("spatial_merge_size", 2, high=16),
            output_width=reader.integer("projection_dim", high=MAX_WIDTH) * (1 + len(layers)),
            sight=Sight(interleaved_axes(rotary, sections), len(layers)),
            host_tables=(_TABLE,),
            table_side=math.isqrt(shapes[_TABLE][0]),
            deepstack=tuple((layer, layer) for layer in layers),
        )

    @classmethod
    def processor_settings(cls, reader: ConfigReader) -> tuple[str, Mapping[str, Any], Mapping[str, Any]]:
        return "qwen3_vl", {}, {**qwen_pixels(reader, 16), **statistics(reader)}

    def inputs(self, tiles: Sequence[ImageTile], tables: Mapping[str, Array]) -> TowerInputs:
        table = tables[_TABLE]
        places = [
            in_blocks(bilinear(table, self.table_side, tile.grid_rows, tile.grid_cols), self.merge_size)
            for tile in tiles
        ]
        return TowerInputs((np.concatenate(places),), tile_rows(tiles, self.merge_size))


def _axes_from_hf(text: ConfigReader) -> tuple[int, ...]:
    """Return the component that each frequency rotates by, for interleaved sections.

    Of every three neighbouring frequencies, the second rotates by the row and the third by the column, as far as their
    sections reach. All others rotate by time.
    """
    section = rope_section(text)
    head_dim = text.integer("head_dim", 128, high=MAX_WIDTH)
    rotary = int(head_dim * section.number("partial_rotary_factor", 1.0, high=1.0)) // 2
    sections = section.counts("mrope_section", 3) if section.has("mrope_section") else (24, 20, 20)
    return interleaved_axes(rotary, sections)


def interleaved_axes(count: int, sections: Sequence[int]) -> tuple[int, ...]:
    """Return the component that each of `count` frequencies rotates by.

    sections: number of frequencies for time, row and column.
    """
    axes = [0] * count
    for axis in (1, 2):
        for i in range(axis, min(3 * sections[axis], count), 3):
            axes[i] = axis
    return tuple(axes)


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the rows [MERGED, output_width]: the last layer's, then DeepStack's."""
    h = g.linear(g.add(Input(0, PATCHES, cfg.patch_values)), "patch_embed.proj")
    h = h + g.add(Input(1, PATCHES, cfg.hidden_size))
    rope, features = plane_rope(cfg.head_dim), []
    for i in range(cfg.num_layers):
        stem = f"blocks.{i}"
        x = g.layer_norm(h, f"{stem}.norm1", _NORM_EPS)
        h = h + g.linear(attention(g, x, cfg, f"{stem}.attn", rope), f"{stem}.attn.proj")
        x = g.layer_norm(h, f"{stem}.norm2", _NORM_EPS)
        up = g.add(Activation(g.linear(x, f"{stem}.mlp.linear_fc1"), cfg.activation))
        h = h + g.linear(up, f"{stem}.mlp.linear_fc2")
        for layer, number in cfg.deepstack:
            if layer == i:
                merged = g.add(Gather(h, BLOCKS, cfg.merge_size**2))
                normed = g.layer_norm(merged, f"deepstack.{number}.norm", _NORM_EPS)
                features.append(_merger(g, normed, f"deepstack.{number}"))
    h = g.add(Gather(g.layer_norm(h, "merger.norm", _NORM_EPS), BLOCKS, cfg.merge_size**2))
    out = _merger(g, h, "merger")
    for feature in features:
        out = g.add(SideBySide(out, feature))
    return out


def _merger(g: Graph, x: Value, stem: str) -> Value:
    return g.linear(g.add(Activation(g.linear(x, f"{stem}.linear_fc1"), "gelu")), f"{stem}.linear_fc2")
