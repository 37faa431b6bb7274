"""Jina Embeddings v3: XLM-RoBERTa with rotary positions. Sturua et al., arXiv 2409.10173.

The published checkpoint contains low-rank matrices for five tasks in addition to its weights; `octavo.adapters.tasks`
reads them as adapters. jina-colbert-v2 has this architecture without them.
"""

from __future__ import annotations

from collections.abc import Mapping

from octavo.models._encoder import EncoderConfig, build, head_dim_of, split_encoder
from octavo.models._reading import MAX_LAYERS, ConfigReader
from octavo.models._rope import rope_from_gguf, rope_from_hf, rope_section
from octavo.models._weights import WeightTable
from octavo.models.xlm_roberta import WEIGHTS as XLM_ROBERTA

__all__ = ["ALIASES", "VARIANT_OF", "WEIGHTS", "Config", "build"]

ALIASES = ("jina-bert-v3",)
VARIANT_OF = ("xlm_roberta", "position_embedding_type", "rotary")

_STORED, _LAYER = "encoder.layers.*.", "layers.*."
_PLAIN = {
    **XLM_ROBERTA.names,
    "emb_ln": "embed_norm",
    _STORED + "mixer.Wqkv": _LAYER + "self_attn.qkv_proj",
    _STORED + "mixer.out_proj": _LAYER + "self_attn.o_proj",
    _STORED + "norm1": _LAYER + "post_attention_layernorm",
    _STORED + "norm2": _LAYER + "post_feedforward_layernorm",
    _STORED + "mlp.fc1": _LAYER + "mlp.up_proj",
    _STORED + "mlp.fc2": _LAYER + "mlp.down_proj",
    _LAYER + "mlp.fc1": _LAYER + "mlp.up_proj",
    _LAYER + "mlp.fc2": _LAYER + "mlp.down_proj",
    _LAYER + "post_mlp_layernorm": _LAYER + "post_feedforward_layernorm",
}
WEIGHTS = WeightTable(
    prefixes=XLM_ROBERTA.prefixes,
    # A weight with task adapters is stored under the name that torch's parametrizations give it.
    names=_PLAIN | {f"{stem}.parametrizations.weight.original": f"{name}.weight" for stem, name in _PLAIN.items()},
    transforms=split_encoder(),
)


class Config(EncoderConfig):
    """Configuration of Jina Embeddings v3, read from transformers' keys or the authors' own (xlm-roberta)."""

    __slots__ = ()

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        head_dim = head_dim_of(reader, "attention.head_count", "embedding_length")
        rope = rope_from_gguf(reader, head_dim, reader.integer("context_length"))
        ropes = (rope,) * reader.integer("block_count", high=MAX_LAYERS)
        return cls.read_gguf(reader, shapes, ropes=ropes)

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        head_dim = head_dim_of(reader, "num_attention_heads", "hidden_size")
        theta = reader.number("rotary_emb_base", 20_000.0, low=1.0)
        rope = rope_from_hf(rope_section(reader), head_dim, theta, reader.integer("max_position_embeddings"))
        ropes = (rope,) * reader.integer("num_hidden_layers", high=MAX_LAYERS)
        return cls.read_hf(reader, norm_eps=1e-5, ropes=ropes)
