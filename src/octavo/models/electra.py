"""ELECTRA: BERT whose embeddings may be narrower than its layers. Clark et al., arXiv 2003.10555."""

from __future__ import annotations

from octavo.models import bert
from octavo.models._encoder import build
from octavo.models._reading import ConfigReader
from octavo.models._weights import WeightTable

__all__ = ["WEIGHTS", "Config", "build"]

WEIGHTS = WeightTable(
    prefixes=("electra.", "model."),
    names={
        **bert.BERT_NAMES,
        "embeddings_project": "project_in",
        "classifier.dense": "pooler",
        "classifier.out_proj": "classifier",
    },
)


class Config(bert.Config):
    """ELECTRA's configuration. A classification head has a gelu between its two linears."""

    __slots__ = ()

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        return cls.read_hf(reader, norm_eps=1e-12, position_offset=0, head_activation="gelu")
