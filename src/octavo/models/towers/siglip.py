"""SigLIP's and SigLIP 2's image encoder: pooling by a learned query over all patches. arXiv 2303.15343, 2502.14786."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.batch import Array, DomainRows
from octavo.graph.builder import Graph
from octavo.graph.ops.encoder import EncoderAttention, EncoderAttentionParams
from octavo.graph.ops.linear import Input
from octavo.graph.ops.rows import Gather
from octavo.graph.ops.rowwise import Activation
from octavo.graph.patches import BLOCKS, MERGED, PATCHES
from octavo.graph.spans import GIVES_VECTORS
from octavo.graph.values import IndexArray, Value
from octavo.image_layout import ImageTile
from octavo.models._reading import MAX_WIDTH, ConfigReader
from octavo.models._weights import Split, WeightTable
from octavo.models.towers._siglip import PLACES, UNFOLDED, SiglipConfig, build_layers, resized_places
from octavo.models.towers._tower import TowerInputs, square_side

MODEL_TYPES = ("siglip", "siglip2")
PROJECTORS = ()

_TILE_OF = IndexArray(PATCHES, "tiles")
_PROBE = "head.probe.weight"
WEIGHTS = WeightTable(
    prefixes=("vision_model.",),
    names={
        "head.probe": _PROBE,
        "head.attention.in_proj_weight": "head.qkv.weight",
        "head.attention.in_proj_bias": "head.qkv.bias",
        "head.attention.out_proj": "head.out_proj",
    },
    transforms=(
        UNFOLDED,
        Split("head.qkv", tuple(f"head.{part}_proj" for part in "qkv"), lambda cfg: cfg.qkv_rows),
    ),
)


@dataclass(frozen=True, slots=True)
class Config(SiglipConfig):
    """Configuration of SigLIP's image encoder. Tiles may have any shape."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        vision = reader.section("vision_config")
        if not vision.flag("vision_use_head", True):
            raise vision.error("vision_use_head", False, "without its head this model cannot embed images")
        if reader.values.get("model_type") == "siglip2":
            side = square_side(vision, "num_patches", vision.integer("num_patches", 256, high=MAX_WIDTH))
        else:
            side = vision.integer("image_size", 224, high=1 << 16) // vision.integer("patch_size", 16, high=1 << 10)
        return cls.read(
            vision,
            merge_size=1,
            table_side=side,
            output_width=vision.integer("hidden_size", 768, high=MAX_WIDTH),
            sight=GIVES_VECTORS,
            host_tables=(PLACES, _PROBE),
        )

    def inputs(self, tiles: Sequence[ImageTile], tables: Mapping[str, Array]) -> TowerInputs:
        grid = tables[PLACES].astype(np.float32).reshape(self.table_side, self.table_side, -1)
        places = [resized_places(grid, t.grid_rows, t.grid_cols).reshape(-1, self.hidden_size) for t in tiles]
        probe = tables[_PROBE].astype(np.float32).reshape(1, -1)
        counts = [len(each) for each in places]
        starts = np.cumsum([0, *counts], dtype=np.int32)
        tile_of = np.repeat(np.arange(len(tiles), dtype=np.int32), counts)
        return TowerInputs(
            (np.concatenate(places), np.tile(probe, (len(tiles), 1))),
            {
                PATCHES.name: DomainRows(int(starts[-1]), starts, indices={_TILE_OF.name: tile_of}),
                MERGED.name: DomainRows(len(tiles), indices={BLOCKS.name: starts[:-1].copy()}),
            },
        )


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the embeddings [MERGED, output_width].

    Every patch row queries with its tile's learned query; one result per tile is kept.
    """
    h = build_layers(g, cfg)
    question = g.linear(g.add(Input(2, MERGED, cfg.hidden_size)), "head.q_proj")
    q = g.add(Gather(question, _TILE_OF))
    k, v = (g.linear(h, f"head.{part}_proj") for part in "kv")
    heads = EncoderAttentionParams(cfg.num_heads, cfg.num_heads, cfg.head_dim, cfg.head_dim**-0.5)
    pooled = g.linear(g.add(Gather(g.add(EncoderAttention(q, k, v, heads)), BLOCKS)), "head.out_proj")
    x = g.layer_norm(pooled, "head.layernorm", cfg.norm_eps)
    up = g.add(Activation(g.linear(x, "head.mlp.fc1"), cfg.activation))
    return pooled + g.linear(up, "head.mlp.fc2")
