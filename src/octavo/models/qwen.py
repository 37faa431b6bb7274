"""Qwen 1: Llama with q, k and v in one biased matrix. Bai et al., arXiv 2309.16609."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.models._attention import AttentionConfig, same_windows
from octavo.models._decoder import DecoderConfig
from octavo.models._mlp import MLPConfig
from octavo.models._reading import MAX_WIDTH, ConfigReader
from octavo.models._weights import WeightTable, fused_qkv
from octavo.models.llama import build

__all__ = ["WEIGHTS", "Config", "build"]

_LAYER = "h.*."
WEIGHTS = WeightTable(
    prefixes=("transformer.",),
    names={
        "wte": "embed_tokens",
        "ln_f": "norm",
        _LAYER + "ln_1": "layers.*.input_layernorm",
        _LAYER + "ln_2": "layers.*.post_attention_layernorm",
        _LAYER + "attn.c_attn": "layers.*.self_attn.qkv_proj",
        _LAYER + "attn.c_proj": "layers.*.self_attn.o_proj",
        _LAYER + "mlp.w1": "layers.*.mlp.up_proj",
        _LAYER + "mlp.w2": "layers.*.mlp.gate_proj",
        _LAYER + "mlp.c_proj": "layers.*.mlp.down_proj",
    },
    transforms=(fused_qkv(),),
)


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Qwen 1's configuration.

    Both file formats give twice the MLP's width. The rotary embedding is not scaled for longer contexts than in
    training.
    """

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        config = cls.read_gguf(reader, shapes)
        return replace(config, mlp=replace(config.mlp, intermediate_size=config.mlp.intermediate_size // 2))

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        reader = as_llama(reader)
        width = reader.integer("intermediate_size", high=MAX_WIDTH) // 2
        mlp = MLPConfig.from_hf(reader.replaced("intermediate_size", width))
        return cls.read_hf(reader, attention=AttentionConfig(same_windows(reader)), mlp=mlp)


def as_llama(reader: ConfigReader) -> ConfigReader:
    """Rename the authors' keys to Llama's. The context length is the one used in training: `seq_length`."""
    if not reader.flag("scale_attn_weights", True):
        raise reader.error("scale_attn_weights", False, "must be true")
    share = reader.number("rotary_pct", 1.0, high=1.0)
    names = {"layer_norm_epsilon": "rms_norm_eps", "rotary_emb_base": "rope_theta", "kv_channels": "head_dim"}
    reader = reader.renamed(names).with_defaults({"partial_rotary_factor": share})
    return (
        reader.replaced("max_position_embeddings", reader.integer("seq_length")) if reader.has("seq_length") else reader
    )
