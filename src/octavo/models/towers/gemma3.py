"""Gemma 3's image encoder: SigLIP, followed by averaging over squares and a projection. arXiv 2503.19786."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.graph.builder import Graph
from octavo.graph.ops.rows import PoolRows
from octavo.graph.patches import BLOCKS
from octavo.graph.spans import Sight
from octavo.graph.values import Value
from octavo.models._reading import MAX_WIDTH, ConfigReader
from octavo.models._weights import Fold, Transpose, WeightTable
from octavo.models._wrapped import text_section
from octavo.models.towers._siglip import (
    GGUF_NAMES,
    PLACES,
    PREFIXES,
    UNFOLDED,
    SiglipConfig,
    build_layers,
    siglip_sizes,
)
from octavo.models.towers._tower import square_side, statistics

MODEL_TYPES = ("gemma3",)
PROJECTORS = ("gemma3",)

_MERGE = 4  # side of a square in patches; not given in files

WEIGHTS = WeightTable(
    prefixes=(*PREFIXES, "model.multi_modal_projector.", "multi_modal_projector."),
    names={
        **GGUF_NAMES,
        "mm.input_projection": "projection",
        "mm.soft_emb_norm": "soft_norm",
        "mm_input_projection_weight": "projection.weight",
        "mm_soft_emb_norm": "soft_norm",
    },
    transforms=(UNFOLDED, Transpose("projection"), Fold("soft_norm", 1.0, "safetensors")),
)


@dataclass(frozen=True, slots=True)
class Config(SiglipConfig):
    """Configuration of Gemma 3's image encoder."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        vision = reader.section("vision_config")
        side = vision.integer("image_size", 224, high=1 << 16) // vision.integer("patch_size", 16, high=1 << 10)
        count = reader.integer("mm_tokens_per_image", 256, high=1 << 16)
        merged = square_side(reader, "mm_tokens_per_image", count)
        if side % merged:
            raise reader.error("mm_tokens_per_image", count, f"does not divide {side} x {side} patches evenly")
        return cls.read(
            vision,
            merge_size=side // merged,
            table_side=side,
            output_width=text_section(reader).integer("hidden_size", 2304, high=MAX_WIDTH),
            sight=Sight(both_ways=count),
        )

    @classmethod
    def from_gguf(cls, reader: ConfigReader, text: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        del text
        side, merge = math.isqrt(shapes[PLACES][0]), reader.integer("projector.scale_factor", _MERGE, high=16)
        sight = Sight(both_ways=(side // merge) ** 2)
        return cls(merge_size=merge, table_side=side, sight=sight, **siglip_sizes(reader))

    @classmethod
    def processor_settings(cls, reader: ConfigReader) -> tuple[str, Mapping[str, Any], Mapping[str, Any]]:
        side, patch = reader.integer("image_size", high=1 << 16), reader.integer("patch_size", high=1 << 10)
        merge = reader.integer("projector.scale_factor", _MERGE, high=16)
        config = {"vision_config": {"patch_size": patch}, "mm_tokens_per_image": (side // patch // merge) ** 2}
        return "gemma3", config, {"size": {"height": side, "width": side}, **statistics(reader)}


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the rows [MERGED, output_width]."""
    pooled = g.add(PoolRows(build_layers(g, cfg), BLOCKS, cfg.merge_size**2))
    return g.linear(g.rms_norm(pooled, "soft_norm", cfg.norm_eps), "projection")
