"""MPNet: BERT with relative-position biases shared by all layers. Song et al., arXiv 2004.09297.

all-mpnet-base-v2 and multi-qa-mpnet-base use this architecture.
"""

from __future__ import annotations

from collections.abc import Mapping

from octavo.models._encoder import EncoderConfig, build
from octavo.models._reading import ConfigReader
from octavo.models._relative import buckets_by_distance
from octavo.models._weights import ByDistance, WeightTable
from octavo.models.bert import BERT_NAMES

__all__ = ["WEIGHTS", "Config", "build"]

_NUM_BUCKETS = 32
_ATTENTION = "layers.*.self_attn."
WEIGHTS = WeightTable(
    prefixes=("mpnet.", "model."),
    names={
        **BERT_NAMES,
        **{f"encoder.layer.*.attention.attn.{part}": f"{_ATTENTION}{part}_proj" for part in "qkvo"},
        "encoder.layer.*.attention.LayerNorm": "layers.*.post_attention_layernorm",
        "encoder.relative_attention_bias": "distance_bias",
        "classifier.dense": "pooler",
        "classifier.out_proj": "classifier",
    },
    transforms=(ByDistance("distance_bias", lambda _: buckets_by_distance(_NUM_BUCKETS, 128, both_ways=True)),),
)


class Config(EncoderConfig):
    """MPNet's configuration. The first two rows of the position table are never used."""

    __slots__ = ()

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        return cls.read_gguf(reader, shapes, position_offset=0, distance_bias="distance_bias.weight")

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        if (buckets := reader.integer("relative_attention_num_buckets", _NUM_BUCKETS)) != _NUM_BUCKETS:
            # transformers uses 32 buckets of a table of any size.
            raise reader.error("relative_attention_num_buckets", buckets, f"must be {_NUM_BUCKETS}")
        # Positions begin after row 1, whatever the padding token is.
        return cls.read_hf(reader, norm_eps=1e-12, position_offset=2, distance_bias="distance_bias.weight")
