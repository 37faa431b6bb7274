"""CLIP's image encoder: an extra row in addition to the patches becomes the image's embedding. arXiv 2103.00020."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.batch import Array, DomainRows
from octavo.graph.builder import Graph
from octavo.graph.ops.linear import Input
from octavo.graph.ops.rows import AddRows, Gather
from octavo.graph.patches import BLOCKS, MERGED, PATCHES
from octavo.graph.spans import GIVES_VECTORS
from octavo.graph.values import RowDomain, Value
from octavo.image_layout import ImageTile
from octavo.models._reading import MAX_WIDTH, ConfigReader
from octavo.models._weights import Unfolded, WeightTable
from octavo.models.clip import clip_section
from octavo.models.towers._classed import CLASSED, PATCH_OF, classed_rows
from octavo.models.towers._siglip import SiglipConfig, layer
from octavo.models.towers._tower import TowerInputs, read_activation

MODEL_TYPES = ("clip",)
PROJECTORS = ()

_CLASS, _PLACES = "embeddings.class.weight", "embeddings.position_embedding.weight"
WEIGHTS = WeightTable(
    prefixes=("vision_model.", "visual_"),
    names={"embeddings.class_embedding": _CLASS},
    transforms=(Unfolded("embeddings.patch_embedding"),),
)


@dataclass(frozen=True, slots=True)
class Config(SiglipConfig):
    """Configuration of CLIP's image encoder."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        vision = clip_section(reader, "vision_config").with_defaults({"patch_size": 32})
        return cls.read(
            vision,
            merge_size=1,
            activation=read_activation(vision, "quick_gelu"),
            norm_eps=vision.number("layer_norm_eps", 1e-5, high=1.0),
            table_side=vision.integer("image_size", 224, high=1 << 16) // vision.integer("patch_size", high=1 << 10),
            output_width=reader.integer("projection_dim", 512, high=MAX_WIDTH),
            sight=GIVES_VECTORS,
            host_tables=(_CLASS, _PLACES),
        )

    def most_rows(self, patches: int) -> dict[RowDomain, int]:
        tiles = patches // self.table_side**2
        return {PATCHES: patches, MERGED: tiles, CLASSED: patches + tiles}

    def inputs(self, tiles: Sequence[ImageTile], tables: Mapping[str, Array]) -> TowerInputs:
        count, square = len(tiles), self.table_side**2
        places = tables[_PLACES].astype(np.float32)
        first = tables[_CLASS].astype(np.float32).reshape(1, -1) + places[:1]
        grid = places[1:].reshape(self.table_side, self.table_side, -1)
        rows, classed = classed_rows(count, first, grid, self.merge_size)
        own = np.arange(count, dtype=np.int32) * (square + 1)
        domains = {
            PATCHES.name: DomainRows(count * square),
            CLASSED.name: classed,
            MERGED.name: DomainRows(count, indices={BLOCKS.name: own}),
        }
        return TowerInputs((rows,), domains)


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the embeddings [MERGED, output_width]."""
    patches = g.linear(g.add(Input(0, PATCHES, cfg.patch_values)), "embeddings.patch_embedding")
    h = g.add(AddRows(g.add(Input(1, CLASSED, cfg.hidden_size)), patches, PATCH_OF))
    h = g.layer_norm(h, "pre_layrnorm", cfg.norm_eps)  # spelled as in the files
    for i in range(cfg.num_layers):
        h = layer(g, cfg, h, i)
    return g.linear(g.layer_norm(g.add(Gather(h, BLOCKS)), "post_layernorm", cfg.norm_eps), "projection")
