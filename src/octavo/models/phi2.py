"""Phi 1, 1.5 and 2: one norm for parallel attention and MLP, biases on all linears and the head. arXiv 2309.05463."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.models._classic import ClassicConfig, build, gguf_rope, hf_rope, split_qkv
from octavo.models._reading import ConfigReader
from octavo.models._weights import WeightTable

__all__ = ["ALIASES", "WEIGHTS", "Config", "build"]

ALIASES = ("phi",)
WEIGHTS = WeightTable(
    names={
        "layers.*.self_attn.dense": "layers.*.self_attn.o_proj",
        "layers.*.mlp.fc1": "layers.*.mlp.up_proj",
        "layers.*.mlp.fc2": "layers.*.mlp.down_proj",
        "final_layernorm": "norm",
    },
    transforms=split_qkv(fused="apart", one_way=True),  # for older GGUF files
)


class Config(ClassicConfig):
    """Configuration of Phi 1 and 2. In GGUF files the MLP's activation is always the tanh approximation of GELU."""

    __slots__ = ()

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        return cls.read_gguf(reader, shapes, rope=gguf_rope(reader), block="parallel", mlp_norm="input_layernorm")

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        if reader.flag("qk_layernorm", False):
            raise reader.error("qk_layernorm", True, "norms on the heads of q and k are not supported for Phi")
        return cls.read_hf(
            reader,
            tied=False,
            kv_heads="num_key_value_heads",
            rope=hf_rope(reader, default_share=0.5),
            block="parallel",
            mlp_norm="input_layernorm",
        )
