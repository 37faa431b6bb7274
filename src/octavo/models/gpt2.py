"""GPT-2: learned positions, fused q, k and v, linears stored transposed. Radford et al., 2019."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.models._classic import ClassicConfig, ClassicT, build, split_qkv
from octavo.models._reading import ConfigReader
from octavo.models._weights import Transpose, WeightTable

__all__ = ["WEIGHTS", "Config", "build"]

_LINEARS = {
    "h.*.attn.c_attn": "layers.*.self_attn.qkv_proj",
    "h.*.attn.c_proj": "layers.*.self_attn.o_proj",
    "h.*.mlp.c_fc": "layers.*.mlp.up_proj",
    "h.*.mlp.c_proj": "layers.*.mlp.down_proj",
}
WEIGHTS = WeightTable(
    prefixes=("transformer.",),
    names={
        **_LINEARS,
        "wte": "embed_tokens",
        "wpe": "embed_positions",
        "position_embd": "embed_positions",
        "h.*.ln_1": "layers.*.input_layernorm",
        "h.*.ln_2": "layers.*.post_attention_layernorm",
        "ln_f": "norm",
    },
    transforms=(*(Transpose(stem, "safetensors") for stem in _LINEARS.values()), *split_qkv(fused="apart")),
)


class Config(ClassicConfig):
    """GPT-2's configuration. In GGUF files the MLP's activation is always the tanh approximation of GELU."""

    __slots__ = ()

    @classmethod
    def from_gguf(cls: type[ClassicT], reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> ClassicT:
        return cls.read_gguf(reader, shapes, position_offset=0)

    @classmethod
    def from_hf(cls: type[ClassicT], reader: ConfigReader) -> ClassicT:
        if reader.flag("add_cross_attention", False):
            raise reader.error("add_cross_attention", True, "attention to an encoder is not supported")
        return cls.read_hf(
            reader,
            tied=True,
            kv_heads="num_key_value_heads",
            position_offset=0,
            attention_scale=None if reader.flag("scale_attn_weights", True) else 1.0,
            divide_scale_by_layer=reader.flag("scale_attn_by_inverse_layer_idx", False),
        )
