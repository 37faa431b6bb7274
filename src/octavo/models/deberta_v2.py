"""DeBERTa v2 and v3: BERT with attention scores that combine content and distance.

He et al., arXiv 2006.03654, 2111.09543.

mxbai-rerank 1 and the classifiers built on DeBERTa v3 use this architecture.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from octavo.graph.ops.encoder import EncoderAttentionParams
from octavo.models._classic import ACTIVATIONS
from octavo.models._encoder import EncoderConfig, build
from octavo.models._reading import ConfigReader
from octavo.models._weights import DistanceVectors, WeightTable
from octavo.models.bert import BERT_NAMES

__all__ = ["ALIASES", "WEIGHTS", "Config", "build"]

ALIASES = ("deberta-v2",)
_STORED, _ATTENTION = "encoder.layer.*.attention.self.", "layers.*.self_attn."
WEIGHTS = WeightTable(
    prefixes=("deberta.", "model."),
    names={
        **BERT_NAMES,
        **{f"{_STORED}{part}_proj": f"{_ATTENTION}{part[0]}_proj" for part in ("query", "key", "value")},
        **{f"{_STORED}pos_{part}_proj": f"{_ATTENTION}distance_{part}_proj" for part in ("query", "key")},
        "encoder.rel_embeddings": "distance_table",
        "encoder.LayerNorm": "distance_norm",
    },
    transforms=(
        DistanceVectors("distance_table", "distance_norm", lambda c: c.distance_projections, lambda c: c.buckets()),
    ),
)
# What the published models have in common.
_FIXED = {"relative_attention": True, "conv_kernel_size": 0}
_TERMS = {"c2p": ("k", "key", "keys"), "p2c": ("q", "query", "queries")}


@dataclass(frozen=True, slots=True)
class Config(EncoderConfig):
    """Configuration of the encoder and its relative positions.

    terms: terms of the scores in addition to q . k: c2p, a query with a distance, and p2c, a key with a distance.
    num_buckets: distance buckets on each side.
    max_distance: distance of the last bucket, or 0 if each distance has its own.
    shares: distance vectors use the projections of queries and keys instead of their own.
    """

    terms: tuple[str, ...] = ()
    num_buckets: int = 0
    max_distance: int = 0
    shares: bool = True

    def attention_params(self, layer: int) -> EncoderAttentionParams:
        scale = (self.head_dim * (1 + len(self.terms))) ** -0.5
        return replace(EncoderConfig.attention_params(self, layer), scale=scale)

    @property
    def distance_projections(self) -> dict[str, str]:
        """Stems of the matrices that project distance vectors -> stems of the results."""
        stem = "{0}_proj" if self.shares else "distance_{1}_proj"
        return {
            _ATTENTION + stem.format(*names): f"{_ATTENTION}distance_{names[2]}"
            for term, names in _TERMS.items()
            if term in self.terms
        }

    def buckets(self) -> NDArray[np.intp]:
        """Return the table row for each distance of a key from its query, starting with the furthest key before it."""
        reach = self.max_position_embeddings - 1
        distance = -np.arange(-reach, reach + 1)  # of a query from a key
        bucket = log_buckets(distance, self.num_buckets, self.max_distance) if self.max_distance else distance
        return np.clip(bucket + self.num_buckets, 0, 2 * self.num_buckets - 1)

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        for key, value in _FIXED.items():
            if reader.value(key) not in (None, value) or (key not in reader.values and value is True):
                raise reader.error(key, reader.value(key), f"must be {value!r}")
        width, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
        for key, size in (("embedding_size", width), ("attention_head_size", width // heads)):
            if (found := reader.integer(key, size)) != size:
                raise reader.error(key, found, f"must be {size}")
        positions = reader.integer("max_position_embeddings", 512, low=3)
        distances = reader.integer("max_relative_positions", -1, low=-1)
        distances = positions if distances < 1 else distances
        buckets = reader.integer("position_buckets", -1, low=-1)
        if buckets > 0 and not 2 <= buckets // 2 < distances - 1:
            raise reader.error("position_buckets", buckets, f"must be from 4 to less than twice {distances}")
        return cls.read_hf(
            reader,
            norm_eps=1e-7,
            position_offset=0 if reader.flag("position_biased_input", True) else None,
            head_activation=_head_activation(reader),
            terms=_terms(reader),
            num_buckets=buckets if buckets > 0 else distances,
            max_distance=distances if buckets > 0 else 0,
            shares=reader.flag("share_att_key", False),
        )


def _terms(reader: ConfigReader) -> tuple[str, ...]:
    given = reader.value("pos_att_type")
    terms = [term.strip() for term in given.split("|")] if isinstance(given, str) else given or []
    if not isinstance(terms, list) or not set(terms) <= _TERMS.keys() or not terms:
        raise reader.error("pos_att_type", given, f"must have some of {', '.join(_TERMS)}")
    return tuple(terms)


def _head_activation(reader: ConfigReader) -> str:
    name = reader.text("pooler_hidden_act", "gelu")
    if name != "tanh" and name not in ACTIVATIONS:
        raise reader.error("pooler_hidden_act", name, f"must be tanh, {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS.get(name, name)


def log_buckets(distance: NDArray[np.intp], num_buckets: int, max_distance: int) -> NDArray[np.intp]:
    """Return the bucket of each distance.

    Half of the buckets cover one distance each; the rest grow logarithmically.
    """
    half = num_buckets // 2
    # In float32 like the models' own code, because rounding decides where buckets end.
    apart = np.maximum(np.abs(distance), half).astype(np.float32)
    ratio = np.log(apart / np.float32(half)) / np.log(np.float32((max_distance - 1) / half))
    grown = np.ceil(ratio * np.float32(half - 1)).astype(np.intp) + half
    return np.where(np.abs(distance) <= half, distance, np.sign(distance) * grown)
