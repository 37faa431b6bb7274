"""Jina's BERT: symmetric ALiBi instead of a position table, and a gated MLP. Günther et al., arXiv 2310.19923.

Used by Embeddings v2 and the v1 rerankers. The models for code add norms on q and k, and a second norm after attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.models._classic import alibi_slopes
from octavo.models._encoder import EncoderConfig, build
from octavo.models._reading import MAX_WIDTH, ConfigReader
from octavo.models._weights import Split, WeightTable
from octavo.models.bert import BERT_NAMES

__all__ = ["ALIASES", "VARIANT_OF", "WEIGHTS", "Config", "build"]

ALIASES = ("jina-bert-v2",)
VARIANT_OF = ("bert", "position_embedding_type", "alibi")

_ATTENTION, _MLP = "layers.*.self_attn.", "layers.*.mlp."
_GATE, _UP = _MLP + "gate_proj", _MLP + "up_proj"
WEIGHTS = WeightTable(
    prefixes=("bert.", "model."),
    names={
        **BERT_NAMES,
        "encoder.layer.*.mlp.gated_layers": _MLP + "gate_up_proj",
        "encoder.layer.*.mlp.wo": _MLP + "down_proj",
        "encoder.layer.*.mlp.layernorm": "layers.*.post_feedforward_layernorm",
        # Names in the models for code.
        "encoder.layer.*.mlp.up_gated_layer": _MLP + "up_gate_proj",
        "encoder.layer.*.mlp.down_layer": _MLP + "down_proj",
        "encoder.layer.*.attention.self.layer_norm_q": _ATTENTION + "q_norm",
        "encoder.layer.*.attention.self.layer_norm_k": _ATTENTION + "k_norm",
        "encoder.layer.*.layer_norm_1": "layers.*.second_attention_layernorm",
        "encoder.layer.*.layer_norm_2": "layers.*.post_feedforward_layernorm",
        "blk.*.attn_norm_2": "layers.*.second_attention_layernorm",
    },
    transforms=(
        Split(_MLP + "gate_up_proj", (_GATE, _UP), lambda cfg: cfg.mlp_rows),
        Split(_MLP + "up_gate_proj", (_UP, _GATE), lambda cfg: cfg.mlp_rows),
        Split(_UP, (_GATE, _UP), lambda cfg: cfg.mlp_rows if cfg.stored == "gate_up" else (), "gguf"),
        Split(_UP, (_UP, _GATE), lambda cfg: cfg.mlp_rows if cfg.stored == "up_gate" else (), "gguf"),
    ),
)
_GATED = {"geglu": "gelu", "reglu": "relu"}  # the activation of the gate by `feed_forward_type`


@dataclass(frozen=True, slots=True)
class Config(EncoderConfig):
    """Configuration of Jina's BERT, with the layout of the gated MLP.

    stored: order of the halves of a GGUF file's fused `ffn_up`; empty if gate and up are separate tensors.
    """

    stored: str = ""

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        width = reader.integer("feed_forward_length", high=MAX_WIDTH)
        is_fused = shapes.get("layers.0.mlp.up_proj.weight", ())[:1] == (2 * width,)
        is_for_code = "layers.0.second_attention_layernorm.weight" in shapes
        slopes = alibi_slopes(reader.integer("attention.head_count", high=MAX_WIDTH))
        stored = ("up_gate" if is_for_code else "gate_up") if is_fused else ""
        return cls.read_gguf(reader, shapes, is_gated=True, alibi_slopes=slopes, stored=stored)

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        slopes = alibi_slopes(reader.integer("num_attention_heads", high=MAX_WIDTH))
        kind = reader.text("feed_forward_type", "original")
        if kind not in (*_GATED, "original"):
            raise reader.error("feed_forward_type", kind, f"must be {', '.join(_GATED)} or original")
        gated = {} if kind == "original" else {"is_gated": True, "activation": _GATED[kind]}
        return cls.read_hf(reader, norm_eps=1e-12, alibi_slopes=slopes, **gated)
