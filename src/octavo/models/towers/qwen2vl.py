"""Qwen 2 VL's and 2.5 VL's image encoder: rotary positions, windows in most 2.5 layers. arXiv 2409.12191,
2502.13923.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from octavo.batch import Array, DomainRows, Int32
from octavo.graph.builder import Graph
from octavo.graph.ops.linear import Input
from octavo.graph.ops.rows import Gather
from octavo.graph.ops.rowwise import Activation, GatedActivation
from octavo.graph.patches import BLOCKS, MERGED, PATCHES
from octavo.graph.spans import Sight
from octavo.graph.values import IndexArray, RowDomain, Value
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
    layer_numbers,
    plane_rope,
    qwen_pixels,
    read_activation,
    statistics,
    tile_rows,
)

MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl")
PROJECTORS = ("qwen2vl_merger", "qwen2.5vl_merger")

WINDOWS = RowDomain("windows")
"""The patches of PATCHES, window by window. A window is a sequence."""

_WINDOWED = IndexArray(WINDOWS, "patches")
_WHOLE = IndexArray(PATCHES, "windows")  # back to the original order

_NORM_EPS = 1e-6
_WINDOW_SIDE = 112  # in pixels; older mmproj files do not give it
_SECTIONS = (16, 24, 24)
_FULL_LAYERS = (7, 15, 23, 31)
WEIGHTS = WeightTable(
    prefixes=("model.visual.", "visual."),
    names={
        # GGUF
        **QWEN_NAMES,
        "v.post_ln": "merger.ln_q",
        "mm.0": "merger.mlp.0",
        "mm.2": "merger.mlp.2",
        **{f"v.blk.*.attn_{part}": f"blocks.*.attn.{part}_proj" for part in "qkv"},
        "v.blk.*.ffn_gate": "blocks.*.mlp.gate_proj",
        "v.blk.*.ffn_up": "blocks.*.mlp.up_proj",
        "v.blk.*.ffn_down": "blocks.*.mlp.down_proj",
        # safetensors of Qwen 2 VL
        "blocks.*.mlp.fc1": "blocks.*.mlp.up_proj",
        "blocks.*.mlp.fc2": "blocks.*.mlp.down_proj",
    },
    transforms=(QWEN_UNFOLDED, replace(QWEN_QKV, one_way=True)),
)


@dataclass(frozen=True, slots=True)
class Config(TowerConfig):
    """Configuration of Qwen 2 VL's and 2.5 VL's image encoder.

    window: side of a window in blocks. 0 means Qwen 2 VL: no windows, LayerNorm instead of RMSNorm, and a plain MLP.
    full_layers: layers without windows in 2.5 VL, where every patch sees the whole image.
    """

    activation: str = "silu"
    window: int = 0
    full_layers: frozenset[int] = frozenset()

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        vision, text = reader.section("vision_config"), text_section(reader)
        is_second = reader.values.get("model_type") == "qwen2_vl"
        patch, merge = vision.integer("patch_size", 14, high=1 << 10), vision.integer("spatial_merge_size", 2, high=16)
        frames = vision.integer("temporal_patch_size", 2, high=16)
        width = vision.integer("embed_dim" if is_second else "hidden_size", 1280, high=MAX_WIDTH)
        section = rope_section(text)
        sections = section.counts("mrope_section", 3) if section.has("mrope_section") else _SECTIONS
        return cls(
            num_layers=vision.integer("depth", 32, high=MAX_LAYERS),
            hidden_size=width,
            num_heads=vision.integer("num_heads", 16, high=MAX_WIDTH),
            patch_values=vision.integer("in_channels", 3, high=16) * frames * patch * patch,
            merge_size=merge,
            output_width=vision.integer("hidden_size" if is_second else "out_hidden_size", 3584, high=MAX_WIDTH),
            sight=Sight(_axes(sections)),
            activation=read_activation(vision, "quick_gelu" if is_second else "silu"),
            window=0 if is_second else _window(vision, merge * patch),
            full_layers=frozenset(() if is_second else layer_numbers(vision, "fullatt_block_indexes", _FULL_LAYERS)),
        )

    @classmethod
    def from_gguf(cls, reader: ConfigReader, text: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        patch, merge = reader.integer("patch_size", 14, high=1 << 10), reader.integer("spatial_merge_size", 2, high=16)
        num_layers = reader.integer("block_count", high=MAX_LAYERS)
        is_second, full = "blocks.0.mlp.gate_proj.weight" not in shapes, frozenset[int]()
        if not is_second:
            pattern = reader.integer("n_wa_pattern", high=MAX_LAYERS)
            full = frozenset(range(pattern - 1, num_layers, pattern))
        return cls(
            num_layers=num_layers,
            hidden_size=reader.integer("embedding_length", high=MAX_WIDTH),
            num_heads=reader.integer("attention.head_count", high=MAX_WIDTH),
            patch_values=3 * 2 * patch * patch,
            merge_size=merge,
            output_width=shapes["merger.mlp.2.weight"][0],
            sight=Sight(_axes(text.counts("rope.dimension_sections", 4)[:3])),
            activation="quick_gelu" if is_second else "silu",
            window=0 if is_second else _window(reader, merge * patch),
            full_layers=full,
        )

    @classmethod
    def processor_settings(cls, reader: ConfigReader) -> tuple[str, Mapping[str, Any], Mapping[str, Any]]:
        model_type = "qwen2_5_vl" if reader.has("n_wa_pattern") else "qwen2_vl"  # positions of videos differ
        return model_type, {}, {**qwen_pixels(reader, 14), **statistics(reader)}

    def most_rows(self, patches: int) -> dict[RowDomain, int]:
        return {**super(Config, self).most_rows(patches), **({WINDOWS: patches} if self.window else {})}

    def inputs(self, tiles: Sequence[ImageTile], tables: Mapping[str, Array]) -> TowerInputs:
        del tables
        rows = tile_rows(tiles, self.merge_size)
        return TowerInputs((), self._with_windows(tiles, rows) if self.window else rows)

    def _with_windows(self, tiles: Sequence[ImageTile], rows: Mapping[str, DomainRows]) -> dict[str, DomainRows]:
        """Return the rows with an added WINDOWS domain, and the index arrays that map rows to it and back."""
        patches, square = rows[PATCHES.name], self.merge_size**2
        order: list[Int32] = []
        counts: list[int] = []
        begin = 0
        for tile in tiles:
            windows = self._windows(tile)
            order += [(blocks[:, None] * square + np.arange(square)).reshape(-1) + begin for blocks in windows]
            counts += [len(blocks) * square for blocks in windows]
            begin += tile.num_patches
        there = np.concatenate(order).astype(np.int32)
        back = np.empty_like(there)
        back[there] = np.arange(len(there), dtype=np.int32)
        assert patches.positions is not None
        starts, places = np.cumsum([0, *counts], dtype=np.int32), np.ascontiguousarray(patches.positions[:, there])
        return {
            PATCHES.name: DomainRows(patches.count, patches.starts, patches.positions, {_WHOLE.name: back}),
            WINDOWS.name: DomainRows(patches.count, starts, places, {_WINDOWED.name: there}),
            MERGED.name: DomainRows(rows[MERGED.name].count, indices={BLOCKS.name: back}),
        }

    def _windows(self, tile: ImageTile) -> list[Int32]:
        """Return the block numbers of each window of a tile. Windows at the right and bottom edges may be smaller."""
        rows, cols, side = tile.grid_rows // self.merge_size, tile.grid_cols // self.merge_size, self.window
        blocks = np.arange(rows * cols, dtype=np.int32).reshape(rows, cols)
        corners = product(range(0, rows, side), range(0, cols, side))
        return [blocks[top : top + side, left : left + side].reshape(-1) for top, left in corners]


def _window(reader: ConfigReader, side: int) -> int:
    """Return the side of a window in blocks.

    side: side of a block in pixels.
    """
    return reader.integer("window_size", _WINDOW_SIDE, low=side, high=1 << 16) // side


def _axes(sections: Sequence[int]) -> tuple[int, ...]:
    """Return the component that each frequency rotates by, for consecutive sections: time, row and column."""
    return tuple(axis for axis, count in enumerate(sections) for _ in range(count))


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the rows [MERGED, output_width]."""
    h = g.linear(g.add(Input(0, PATCHES, cfg.patch_values)), "patch_embed.proj")
    if cfg.window:
        h = g.add(Gather(h, _WINDOWED))
    rope = plane_rope(cfg.head_dim)
    for i in range(cfg.num_layers):
        stem = f"blocks.{i}"
        x = _norm(g, cfg, h, f"{stem}.norm1")
        if cfg.window and i in cfg.full_layers:
            whole = attention(g, g.add(Gather(x, _WHOLE)), cfg, f"{stem}.attn", rope)
            x = g.add(Gather(whole, _WINDOWED))
        else:
            x = attention(g, x, cfg, f"{stem}.attn", rope)
        h = h + g.linear(x, f"{stem}.attn.proj")
        x = _norm(g, cfg, h, f"{stem}.norm2")
        up = g.linear(x, f"{stem}.mlp.up_proj")
        if cfg.window:
            up = g.add(GatedActivation(g.linear(x, f"{stem}.mlp.gate_proj"), up, cfg.activation))
        else:
            up = g.add(Activation(up, cfg.activation))
        h = h + g.linear(up, f"{stem}.mlp.down_proj")
    merged = g.add(Gather(_norm(g, cfg, h, "merger.ln_q"), BLOCKS, cfg.merge_size**2))
    return g.linear(g.add(Activation(g.linear(merged, "merger.mlp.0"), "gelu")), "merger.mlp.2")


def _norm(g: Graph, cfg: Config, x: Value, name: str) -> Value:
    return g.rms_norm(x, name, _NORM_EPS) if cfg.window else g.layer_norm(x, name, _NORM_EPS)
