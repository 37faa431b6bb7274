"""BLOOM: ALiBi, and a norm after the embeddings. Le Scao et al., arXiv 2211.05100."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from octavo.models._classic import ClassicConfig, alibi_slopes, build, split_qkv
from octavo.models._reading import ConfigReader
from octavo.models._weights import WeightTable

__all__ = ["WEIGHTS", "Config", "build"]

WEIGHTS = WeightTable(
    prefixes=("transformer.",),
    names={
        "word_embeddings": "embed_tokens",
        "word_embeddings_layernorm": "embed_norm",
        "token_embd_norm": "embed_norm",
        "h.*.input_layernorm": "layers.*.input_layernorm",
        "h.*.post_attention_layernorm": "layers.*.post_attention_layernorm",
        "h.*.self_attention.query_key_value": "layers.*.self_attn.qkv_proj",
        "h.*.self_attention.dense": "layers.*.self_attn.o_proj",
        "h.*.mlp.dense_h_to_4h": "layers.*.mlp.up_proj",
        "h.*.mlp.dense_4h_to_h": "layers.*.mlp.down_proj",
        "ln_f": "norm",
    },
    transforms=split_qkv(fused="by_head"),
)


class Config(ClassicConfig):
    """BLOOM's configuration. Sequences may have any length; the model was trained with 2048 tokens."""

    __slots__ = ()

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        config = cls.read_gguf(reader, shapes, embedding_norm=True)
        return replace(config, alibi_slopes=alibi_slopes(config.num_heads))

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        normed = reader.flag("apply_residual_connection_post_layernorm", False)
        block = "normed_residual" if normed else "pre_norm"
        config = cls.read_hf(
            reader, tied=True, positions=2048, activation="gelu_tanh", block=block, embedding_norm=True
        )
        return replace(config, alibi_slopes=alibi_slopes(config.num_heads))
