"""BERT: learned positions, token types, norms after attention and MLP. Devlin et al., arXiv 1810.04805.

BGE, E5, GTE, MiniLM and the cross-encoders of sentence-transformers use this architecture.
"""

from __future__ import annotations

from collections.abc import Mapping

from octavo.models._encoder import EncoderConfig, build
from octavo.models._reading import ConfigReader
from octavo.models._weights import WeightTable

__all__ = ["BERT_NAMES", "WEIGHTS", "Config", "build"]

_NORMS = {
    "embeddings.LayerNorm": "embed_norm",
    "encoder.layer.*.attention.output.LayerNorm": "layers.*.post_attention_layernorm",
    "encoder.layer.*.output.LayerNorm": "layers.*.post_feedforward_layernorm",
}
# Those of BERT and of the families that took them over; GGUF files of these families have one set, too.
BERT_NAMES = {
    **_NORMS,
    # Names in checkpoints converted from TensorFlow, such as bert-base-uncased.
    **{f"{stem}.gamma": f"{name}.weight" for stem, name in _NORMS.items()},
    **{f"{stem}.beta": f"{name}.bias" for stem, name in _NORMS.items()},
    "embeddings.word_embeddings": "embed_tokens",
    "embeddings.position_embeddings": "embed_positions",
    "embeddings.token_type_embeddings": "embed_types",
    "encoder.layer.*.attention.self.query": "layers.*.self_attn.q_proj",
    "encoder.layer.*.attention.self.key": "layers.*.self_attn.k_proj",
    "encoder.layer.*.attention.self.value": "layers.*.self_attn.v_proj",
    "encoder.layer.*.attention.output.dense": "layers.*.self_attn.o_proj",
    "encoder.layer.*.intermediate.dense": "layers.*.mlp.up_proj",
    "encoder.layer.*.output.dense": "layers.*.mlp.down_proj",
    "pooler.dense": "pooler",
    # The pretraining head, which models for sparse vectors have, and ColBERT's head.
    "cls.predictions.transform.dense": "mlm",
    "cls.predictions.transform.LayerNorm": "mlm_norm",
    "cls.predictions.decoder": "mlm_decoder",
    "cls.predictions": "mlm_decoder",
    "linear": "projection",
    "position_embd": "embed_positions",
    "token_types": "embed_types",
    "token_embd_norm": "embed_norm",
    "blk.*.attn_output_norm": "layers.*.post_attention_layernorm",
    "blk.*.layer_output_norm": "layers.*.post_feedforward_layernorm",
    "cls": "pooler",
    "cls.output": "classifier",
}
WEIGHTS = WeightTable(prefixes=("bert.", "model."), names=BERT_NAMES)


class Config(EncoderConfig):
    """BERT's configuration.

    A classification head reads the first token. Embeddings are the mean over tokens unless the checkpoint specifies
    otherwise.
    """

    __slots__ = ()

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        return cls.read_gguf(reader, shapes, position_offset=0)

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        return cls.read_hf(reader, norm_eps=1e-12, position_offset=0)
