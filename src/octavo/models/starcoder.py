"""StarCoder and SantaCoder (GPT-BigCode): GPT-2 with one key and value head for all. Li et al., arXiv 2305.06161."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.models._classic import ClassicConfig, build, hf_key, split_qkv
from octavo.models._reading import MAX_WIDTH, ConfigReader
from octavo.models._weights import Permute, WeightTable

__all__ = ["WEIGHTS", "Config", "build"]

ALIASES = ("gpt_bigcode",)


def _rows(cfg: Any) -> NDArray[np.intp]:
    """The stored row of each row of q, k and v, which lie together for each head unless all share one of k and v."""
    rows: NDArray[np.intp] = np.arange((cfg.num_heads + 2 * cfg.num_kv_heads) * cfg.head_dim)
    if cfg.num_kv_heads == 1:
        return rows
    by_head: NDArray[np.intp] = rows.reshape(cfg.num_heads, 3, cfg.head_dim).swapaxes(0, 1).reshape(-1)
    return by_head


WEIGHTS = WeightTable(
    prefixes=("transformer.",),
    names={
        "wte": "embed_tokens",
        "wpe": "embed_positions",
        "position_embd": "embed_positions",
        "ln_f": "norm",
        "h.*.ln_1": "layers.*.input_layernorm",
        "h.*.ln_2": "layers.*.post_attention_layernorm",
        "h.*.attn.c_attn": "layers.*.self_attn.qkv_proj",
        "h.*.attn.c_proj": "layers.*.self_attn.o_proj",
        "h.*.mlp.c_fc": "layers.*.mlp.up_proj",
        "h.*.mlp.c_proj": "layers.*.mlp.down_proj",
    },
    transforms=(Permute("layers.*.self_attn.qkv_proj", _rows, "safetensors"), *split_qkv(fused="apart")),
)


class Config(ClassicConfig):
    """The MLP's activation is always the tanh form of GELU in GGUF files."""

    __slots__ = ()

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        return cls.read_gguf(reader, shapes, position_offset=0)

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        if reader.flag("add_cross_attention", False):
            raise reader.error("add_cross_attention", True, "attention to an encoder is not supported")
        heads = reader.integer(hf_key(reader, "heads"), high=MAX_WIDTH)
        count = 1 if reader.flag("multi_query", True) else heads
        return cls.read_hf(
            reader.with_defaults({"num_key_value_heads": count}),
            tied=True,
            kv_heads="num_key_value_heads",
            position_offset=0,
            attention_scale=None if reader.flag("scale_attn_weights", True) else 1.0,
        )
