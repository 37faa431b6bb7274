"""LFM2-VL's image encoder: SigLIP 2 for images of any shape, with each block of rows projected. arXiv 2511.23404."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.batch import Array
from octavo.graph.builder import Graph
from octavo.graph.ops.rows import Gather
from octavo.graph.ops.rowwise import Activation
from octavo.graph.patches import BLOCKS
from octavo.graph.values import Value
from octavo.image_layout import ImageTile
from octavo.models._reading import MAX_WIDTH, ConfigReader
from octavo.models._weights import PermuteColumns, WeightTable
from octavo.models._wrapped import text_section
from octavo.models.towers._siglip import (
    GGUF_NAMES,
    PLACES,
    PREFIXES,
    UNFOLDED,
    SiglipConfig,
    build_layers,
    resized_places,
    siglip_sizes,
)
from octavo.models.towers._tower import TowerInputs, in_blocks, square_side, statistics, tile_rows

MODEL_TYPES = ("lfm2_vl",)
PROJECTORS = ("lfm2",)

_NORM_EPS = 1e-5


def _by_pixel(cfg: SiglipConfig) -> NDArray[np.intp]:
    """Return the columns of the patch projection in pixel order; GGUF files store them colour by colour."""
    order: NDArray[np.intp] = np.arange(cfg.patch_values).reshape(3, -1).T.reshape(-1)
    return order


WEIGHTS = WeightTable(
    prefixes=(*PREFIXES, "model.multi_modal_projector.", "multi_modal_projector."),
    names={
        **GGUF_NAMES,
        "mm.input_norm": "layer_norm",
        "mm.1": "linear_1",
        "mm.2": "linear_2",
    },
    transforms=(replace(UNFOLDED, only="gguf"), PermuteColumns(UNFOLDED.stem, _by_pixel, "gguf")),
)


@dataclass(frozen=True, slots=True)
class Config(SiglipConfig):
    """Configuration of LFM2-VL's image encoder. Tiles may have any shape."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        vision = reader.section("vision_config")
        count = vision.integer("num_patches", 256, high=MAX_WIDTH)
        return cls.read(
            vision,
            merge_size=reader.integer("downsample_factor", 2, high=16),
            table_side=square_side(vision, "num_patches", count),
            output_width=text_section(reader).integer("hidden_size", 2560, high=MAX_WIDTH),
        )

    @classmethod
    def from_gguf(cls, reader: ConfigReader, text: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        del text
        merge = reader.integer("projector.scale_factor", 2, high=16)
        return cls(merge_size=merge, table_side=math.isqrt(shapes[PLACES][0]), **siglip_sizes(reader))

    @classmethod
    def processor_settings(cls, reader: ConfigReader) -> tuple[str, Mapping[str, Any], Mapping[str, Any]]:
        sides = {
            "encoder_patch_size": reader.integer("patch_size", high=1 << 10),
            "downsample_factor": reader.integer("projector.scale_factor", 2, high=16),
        }
        return "lfm2_vl", {}, {**sides, **statistics(reader)}

    def inputs(self, tiles: Sequence[ImageTile], tables: Mapping[str, Array]) -> TowerInputs:
        grid = tables[PLACES].astype(np.float32).reshape(self.table_side, self.table_side, -1)
        places = [in_blocks(resized_places(grid, tile.grid_rows, tile.grid_cols), self.merge_size) for tile in tiles]
        return TowerInputs((np.concatenate(places),), tile_rows(tiles, self.merge_size, positions=False))


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the rows [MERGED, output_width]."""
    h = g.add(Gather(build_layers(g, cfg), BLOCKS, cfg.merge_size**2))
    if "layer_norm.weight" in g.weights:
        h = g.layer_norm(h, "layer_norm", _NORM_EPS)
    return g.linear(g.add(Activation(g.linear(h, "linear_1"), "gelu")), "linear_2")
