"""GPT-NeoX and Pythia: part of each head rotates, attention parallel to the MLP. arXiv 2204.06745."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.models._classic import ClassicConfig, build, gguf_rope, hf_rope, split_qkv
from octavo.models._reading import ConfigReader
from octavo.models._weights import WeightTable

__all__ = ["ALIASES", "WEIGHTS", "Config", "build"]

ALIASES = ("gpt_neox",)
WEIGHTS = WeightTable(
    prefixes=("gpt_neox.",),
    names={
        "embed_in": "embed_tokens",
        "embed_out": "lm_head",
        "layers.*.attention.query_key_value": "layers.*.self_attn.qkv_proj",
        "layers.*.attention.dense": "layers.*.self_attn.o_proj",
        "layers.*.mlp.dense_h_to_4h": "layers.*.mlp.up_proj",
        "layers.*.mlp.dense_4h_to_h": "layers.*.mlp.down_proj",
        "final_layer_norm": "norm",
    },
    transforms=split_qkv(fused="by_head"),
)


class Config(ClassicConfig):
    """GPT-NeoX's configuration. In GGUF files the MLP's activation is always GELU."""

    __slots__ = ()

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        parallel = reader.flag("use_parallel_residual", True)
        return cls.read_gguf(
            reader, shapes, activation="gelu", rope=gguf_rope(reader), block="parallel" if parallel else "pre_norm"
        )

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        rope = hf_rope(reader, theta="rotary_emb_base", share="rotary_pct", default_share=0.25)
        parallel = reader.flag("use_parallel_residual", True)
        return cls.read_hf(reader, tied=False, rope=rope, block="parallel" if parallel else "pre_norm")
