"""The image encoder of granite-docling 500M and 2B: SigLIP, position embeddings for blocks, and DeepStack features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.batch import Array, Float32
from octavo.graph.builder import Graph
from octavo.graph.ops.linear import Input
from octavo.graph.ops.rows import Gather
from octavo.graph.ops.rowwise import Activation
from octavo.graph.ops.streams import SideBySide
from octavo.graph.patches import BLOCKS, MERGED
from octavo.graph.spans import Sight
from octavo.graph.values import Value
from octavo.image_layout import ImageTile
from octavo.models._reading import MAX_WIDTH, ConfigReader
from octavo.models._weights import WeightTable
from octavo.models._wrapped import text_section
from octavo.models.towers._siglip import UNFOLDED, SiglipConfig, build_layers
from octavo.models.towers._tower import TowerInputs, layer_numbers

MODEL_TYPES = ("granite_docling",)
PROJECTORS = ()

_NORM_EPS = 1e-5  # after the layers
WEIGHTS = WeightTable(prefixes=("model.vision_model.",), transforms=(UNFOLDED,))


@dataclass(frozen=True, slots=True)
class Config(SiglipConfig):
    """Configuration of granite-docling's image encoder, with DeepStack.

    text_width: width of the decoder.
    deepstack: layers after which features are taken.
    factor: factor by which the decoder multiplies its embeddings.
    """

    text_width: int = 0
    deepstack: tuple[int, ...] = ()
    factor: float = 1.0

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        vision, text = reader.section("vision_config"), text_section(reader)
        layers = tuple(sorted(layer_numbers(vision, "deepstack_visual_indexes", (3, 7, 10))))
        width = text.integer("hidden_size", 1024, high=MAX_WIDTH)
        if width % 4:
            raise text.error("hidden_size", width, "must be a multiple of four, for sines and cosines of two positions")
        return cls.read(
            vision,
            merge_size=vision.integer("scale_factor", 4, high=16),
            table_side=vision.integer("image_size", 512, high=1 << 16) // vision.integer("patch_size", 16),
            output_width=width * (1 + len(layers)),
            sight=Sight(num_added=len(layers)),
            text_width=width,
            deepstack=layers,
            factor=text.number("embedding_multiplier", 12.0),
        )

    def inputs(self, tiles: Sequence[ImageTile], tables: Mapping[str, Array]) -> TowerInputs:
        plain = SiglipConfig.inputs(self, tiles, tables)
        places = _places(self.table_side // self.merge_size, self.text_width)
        return TowerInputs((*plain.inputs, np.tile(places, (len(tiles), 1))), plain.domains)


def _places(side: int, width: int) -> Float32:
    """Return sines and cosines of the column, then of the row: [side * side, width]."""
    frequencies = 1e4 ** -(np.arange(width // 4) / (width // 4))
    rows, cols = (grid.reshape(-1, 1) * frequencies for grid in np.mgrid[:side, :side])
    return np.concatenate([np.sin(cols), np.cos(cols), np.sin(rows), np.cos(rows)], axis=1).astype(np.float32)


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the rows [MERGED, output_width]: the last layer's, then DeepStack's."""
    features: list[Value] = []

    def take(layer: int, h: Value) -> None:
        if layer in cfg.deepstack:
            stem = f"connector.coarse.deepstack_mergers.{len(features)}"
            x = g.layer_norm(g.add(Gather(h, BLOCKS, cfg.merge_size**2)), f"{stem}.layer_norm", _NORM_EPS)
            x = g.add(Activation(g.linear(x, f"{stem}.linear_1"), "gelu"))
            features.append(g.linear(x, f"{stem}.linear_2"))

    h = g.layer_norm(build_layers(g, cfg, take), "connector.ln_in", _NORM_EPS)
    h = g.linear(g.add(Gather(h, BLOCKS, cfg.merge_size**2)), "connector.coarse.projection")
    h = g.layer_norm(h + g.add(Input(2, MERGED, cfg.text_width)), "connector.ln_mid", _NORM_EPS)
    h = g.layer_norm(g.linear(g.add(Activation(h, "gelu")), "connector.mlp_fc2"), "connector.ln_out", _NORM_EPS)
    out = h * cfg.factor
    for feature in features:
        out = g.add(SideBySide(out, feature))
    return out
