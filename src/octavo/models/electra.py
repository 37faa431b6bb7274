"""ELECTRA: BERT whose embeddings may be narrower than its layers. Clark et al., arXiv 2003.10555."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.models._encoder import EncoderConfig, build
from octavo.models._reading import ConfigReader
from octavo.models._weights import WeightTable
from octavo.models.bert import BERT_NAMES

__all__ = ["WEIGHTS", "Config", "build"]

WEIGHTS = WeightTable(
    prefixes=("electra.", "model."),
    names={
        **BERT_NAMES,
        "embeddings_project": "project_in",
        "classifier.dense": "pooler",
        "classifier.out_proj": "classifier",
    },
)


class Config(EncoderConfig):
    """A head of classification has a gelu between its two products."""

    __slots__ = ()

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        return cls.read_gguf(reader, shapes, position_offset=0)

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        return cls.read_hf(reader, norm_eps=1e-12, position_offset=0, head_activation="gelu")
