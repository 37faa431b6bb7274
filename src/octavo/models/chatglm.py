"""GLM 4 (2024) and ChatGLM 3: half of each head rotates in neighbouring pairs, with biases on q, k and v. arXiv
2406.12793.

`glm` is the form used by transformers, `chatglm` the authors' own, with q, k and v in one matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.models._attention import AttentionConfig, same_windows
from octavo.models._decoder import DecoderConfig
from octavo.models._reading import ConfigReader
from octavo.models._weights import WeightTable, fused_qkv, gate_and_up, rotary_pairs
from octavo.models.llama import build

__all__ = ["WEIGHTS", "Config", "build"]

ALIASES = ("glm",)
_LAYER = "layers.*."
WEIGHTS = WeightTable(
    prefixes=("transformer.encoder.", "transformer.", "model."),
    names={
        "blk.*.ffn_up": _LAYER + "mlp.gate_up_proj",
        "embedding.word_embeddings": "embed_tokens",
        "final_layernorm": "norm",
        "output_layer": "lm_head",
        _LAYER + "self_attention.query_key_value": _LAYER + "self_attn.qkv_proj",
        _LAYER + "self_attention.dense": _LAYER + "self_attn.o_proj",
        _LAYER + "mlp.dense_h_to_4h": _LAYER + "mlp.gate_up_proj",
        _LAYER + "mlp.dense_4h_to_h": _LAYER + "mlp.down_proj",
    },
    # All files have the two columns of a rotated pair side by side.
    transforms=(fused_qkv(), gate_and_up(), *rotary_pairs()),
)
# Keys of the authors' form -> those of transformers.
_KEYS = {
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "kv_channels": "head_dim",
    "padded_vocab_size": "vocab_size",
    "seq_length": "max_position_embeddings",
    "layernorm_epsilon": "rms_norm_eps",
}


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Configuration of ChatGLM and GLM 4 (2024). Biases are used if the checkpoint has them."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        reader = as_glm(reader)
        reader = reader.with_defaults({"partial_rotary_factor": 0.5, "head_dim": 128, "rms_norm_eps": 1.5625e-7})
        return cls.read_hf(reader, attention=AttentionConfig(same_windows(reader)))


def as_glm(reader: ConfigReader) -> ConfigReader:
    """Rename the authors' keys to transformers'. Refuses anything that differs from their published models."""
    if reader.text("model_type", "glm") != "chatglm":
        return reader
    wanted = {
        "rmsnorm": True,
        "original_rope": True,
        "apply_residual_connection_post_layernorm": False,
        "post_layer_norm": True,
    }
    for key, value in wanted.items():
        if reader.flag(key, value) is not value:
            raise reader.error(key, not value, f"must be {value}")
    if reader.value("pre_seq_len") is not None:
        raise reader.error("pre_seq_len", reader.value("pre_seq_len"), "prefixes are not supported")
    multi_query = reader.flag("multi_query_attention", False)
    heads = reader.integer("num_attention_heads")
    reader = reader.renamed(_KEYS).with_defaults(
        {
            "num_key_value_heads": reader.integer("multi_query_group_num", 1) if multi_query else heads,
            "rope_theta": 10000.0 * reader.number("rope_ratio", 1.0),
        }
    )
    return reader.replaced("vocab_size", reader.integer("padded_vocab_size", reader.integer("vocab_size")))
