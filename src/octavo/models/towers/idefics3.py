"""The image encoder of Idefics 3 and SmolVLM: SigLIP, with each block of rows projected together. arXiv 2408.12637."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.graph.builder import Graph
from octavo.graph.ops.rows import Gather
from octavo.graph.patches import BLOCKS
from octavo.graph.values import Value
from octavo.models._reading import MAX_WIDTH, ConfigReader
from octavo.models._weights import WeightTable
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
from octavo.models.towers._tower import statistics

MODEL_TYPES = ("idefics3", "smolvlm")
PROJECTORS = ("idefics3",)

_MERGE = 4  # side of a block in patches, for files that do not give it

WEIGHTS = WeightTable(
    prefixes=(*PREFIXES, "model.connector.", "connector."),
    names={**GGUF_NAMES, "mm.model.fc": "projection", "modality_projection.proj": "projection"},
    transforms=(UNFOLDED,),
)


@dataclass(frozen=True, slots=True)
class Config(SiglipConfig):
    """Configuration of Idefics 3's image encoder."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        vision = reader.section("vision_config")
        return cls.read(
            vision,
            merge_size=reader.integer("scale_factor", 2, high=16),
            table_side=vision.integer("image_size", 224, high=1 << 16) // vision.integer("patch_size", 32),
            output_width=text_section(reader).integer("hidden_size", 4096, high=MAX_WIDTH),
        )

    @classmethod
    def from_gguf(cls, reader: ConfigReader, text: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        del text
        merge = reader.integer("projector.scale_factor", _MERGE, high=16)
        return cls(merge_size=merge, table_side=math.isqrt(shapes[PLACES][0]), **siglip_sizes(reader))

    @classmethod
    def processor_settings(cls, reader: ConfigReader) -> tuple[str, Mapping[str, Any], Mapping[str, Any]]:
        side = reader.integer("image_size", high=1 << 16)
        vision = {"patch_size": reader.integer("patch_size", high=1 << 10), "image_size": side}
        config = {"vision_config": vision, "scale_factor": reader.integer("projector.scale_factor", _MERGE, high=16)}
        longest = reader.integer("preproc_image_size", 4 * side, high=1 << 16)
        sizes = {"max_image_size": {"longest_edge": side}, "size": {"longest_edge": longest}}
        return "idefics3", config, {**sizes, **statistics(reader)}


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the rows [MERGED, output_width]."""
    return g.linear(g.add(Gather(build_layers(g, cfg), BLOCKS, cfg.merge_size**2)), "projection")
