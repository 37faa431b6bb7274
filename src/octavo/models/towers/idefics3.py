"""The encoder of Idefics 3 and SmolVLM: SigLIP, whose blocks of rows are projected together. arXiv 2408.12637."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.graph.builder import Graph
from octavo.graph.ops.rows import Gather
from octavo.graph.patches import BLOCKS
from octavo.graph.values import Value
from octavo.models._reading import MAX_WIDTH, ConfigReader
from octavo.models._weights import WeightTable
from octavo.models._wrapped import text_section
from octavo.models.towers._siglip import PREFIXES, UNFOLDED, SiglipConfig, build_layers

MODEL_TYPES = ("idefics3", "smolvlm")
PROJECTORS = ()

WEIGHTS = WeightTable(
    prefixes=(*PREFIXES, "model.connector.", "connector."),
    names={"modality_projection.proj": "projection"},
    transforms=(UNFOLDED,),
)


@dataclass(frozen=True, slots=True)
class Config(SiglipConfig):
    """The shared configuration."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        vision = reader.section("vision_config")
        return cls.read(
            vision,
            merge_size=reader.integer("scale_factor", 2, high=16),
            table_side=vision.integer("image_size", 224, high=1 << 16) // vision.integer("patch_size", 32),
            output_width=text_section(reader).integer("hidden_size", 4096, high=MAX_WIDTH),
        )


def build(g: Graph, cfg: Config) -> Value:
    """The rows [MERGED, output_width]."""
    return g.linear(g.add(Gather(build_layers(g, cfg), BLOCKS, cfg.merge_size**2)), "projection")
