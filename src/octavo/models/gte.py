"""GTE (2024): BERT with rotary positions, GeGLU and fused projections. Zhang et al., arXiv 2407.19669.

gte-base-en-v1.5, gte-multilingual-base, their reranker and Arctic Embed M 2.0 use this architecture.
"""

from __future__ import annotations

from octavo.graph.ops.attention import RopeParams
from octavo.models._encoder import EncoderConfig, build, head_dim_of, split_encoder
from octavo.models._reading import MAX_LAYERS, ConfigReader
from octavo.models._rope import rope_from_hf, rope_section, scaled
from octavo.models._weights import Split, WeightTable
from octavo.models.bert import BERT_NAMES

__all__ = ["ALIASES", "WEIGHTS", "Config", "build"]

ALIASES = ("new",)
_STORED, _LAYER = "encoder.layer.*.", "layers.*."
WEIGHTS = WeightTable(
    prefixes=("new.", "gte.", "model."),
    names={
        **BERT_NAMES,
        **{f"{_STORED}attention.{part}_proj": f"{_LAYER}self_attn.{part}_proj" for part in ("q", "k", "v", "qkv", "o")},
        **{f"{_STORED}mlp.{part}_proj": f"{_LAYER}mlp.{part}_proj" for part in ("up_gate", "down")},
        _STORED + "attn_ln": _LAYER + "post_attention_layernorm",
        _STORED + "mlp_ln": _LAYER + "post_feedforward_layernorm",
        _LAYER + "post_mlp_layernorm": _LAYER + "post_feedforward_layernorm",
    },
    transforms=(
        *split_encoder(),
        Split(_LAYER + "mlp.up_gate_proj", (_LAYER + "mlp.up_proj", _LAYER + "mlp.gate_proj"), lambda c: c.mlp_rows),
    ),
)
# Switches of the authors' configuration, with the values that the models have.
_FIXED = {"position_embedding_type": "rope", "layer_norm_type": "layer_norm", "logn_attention_scale": False}


class Config(EncoderConfig):
    """GTE's configuration, read from transformers' keys or the authors' own (`model_type` new)."""

    __slots__ = ()

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        for key, value in _FIXED.items():
            if reader.has(key) and reader.value(key) != value:
                raise reader.error(key, reader.value(key), f"must be {value!r}")
        ropes = (_rope(reader),) * reader.integer("num_hidden_layers", high=MAX_LAYERS)
        reader = reader.replaced("position_embedding_type", "rotary")
        return cls.read_hf(reader, norm_eps=1e-12, is_gated=True, ropes=ropes)


def _rope(reader: ConfigReader) -> RopeParams:
    """Return the rotary embedding.

    NTK scaling multiplies the base by the factor and divides all frequencies by factor^(2 / head_dim), so that the
    lowest frequency is divided by the whole factor (Su, kexue.fm/archives/9706).
    """
    head_dim = head_dim_of(reader, "num_attention_heads", "hidden_size")
    section = rope_section(reader)
    theta = reader.number("rope_theta", 10_000.0 if reader.value("model_type") == "new" else 160_000.0, low=1.0)
    if section.text("type", "") != "ntk":
        return rope_from_hf(section, head_dim, theta, reader.integer("max_position_embeddings"))
    if section.has("mixed_b"):
        raise section.error("mixed_b", section.value("mixed_b"), "must be null: mixed scaling is not supported")
    factor = section.number("factor", low=0.5, high=1e6)
    return scaled(head_dim, theta * factor, factor ** (2 / head_dim))
