"""MPT: ALiBi, no biases; q, k and v are clipped if the configuration says so. MosaicML, 2023."""

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
        "wte": "embed_tokens",
        "blocks.*.norm_1": "layers.*.input_layernorm",
        "blocks.*.attn.Wqkv": "layers.*.self_attn.qkv_proj",
        "blocks.*.attn.out_proj": "layers.*.self_attn.o_proj",
        "blocks.*.norm_2": "layers.*.post_attention_layernorm",
        "blocks.*.ffn.up_proj": "layers.*.mlp.up_proj",
        "blocks.*.ffn.down_proj": "layers.*.mlp.down_proj",
        "norm_f": "norm",
    },
    transforms=split_qkv(fused="apart"),
)

# Values of `attn_config` that would make another model.
_REFUSED = {"alibi": False, "prefix_lm": True, "qk_ln": True, "attn_uses_sequence_id": True}


class Config(ClassicConfig):
    """MPT's configuration. Models with learned positions instead of ALiBi are refused, since none was published."""

    __slots__ = ()

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        max_bias = reader.number("attention.max_alibi_bias", 8.0, high=64.0)  # 0 means no ALiBi
        limit = reader.optional_number("attention.clamp_kqv")
        config = cls.read_gguf(reader, shapes, activation="gelu", qkv_limit=limit)
        return replace(config, alibi_slopes=alibi_slopes(config.num_heads, max_bias))

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        attention = reader.section("attn_config")
        for key, value in _REFUSED.items():
            if attention.flag(key, not value) is value:
                raise attention.error(key, value, "is not supported")
        if attention.text("attn_type", "multihead_attention") != "multihead_attention":
            raise attention.error("attn_type", attention.text("attn_type"), "must be multihead_attention")
        if reader.has("logit_scale"):
            raise reader.error("logit_scale", reader.value("logit_scale"), "must be null")
        config = cls.read_hf(
            reader,
            tied=True,
            activation="gelu",
            attention_scale=attention.optional_number("softmax_scale"),
            qkv_limit=attention.optional_number("clip_qkv"),
        )
        max_bias = attention.number("alibi_bias_max", 8.0, high=64.0)
        return replace(config, alibi_slopes=alibi_slopes(config.num_heads, max_bias))
