"""GPT-J: neighbouring columns rotate, one norm for parallel attention and MLP, a bias on the head. EleutherAI, 2021."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelLoadError
from octavo.models._classic import ClassicConfig, build
from octavo.models._reading import ConfigReader
from octavo.models._rope import scaled
from octavo.models._weights import Permute, WeightTable, halves_of_pairs

__all__ = ["WEIGHTS", "Config", "build"]


def _order(cfg: ClassicConfig) -> NDArray[np.intp]:
    assert cfg.rope is not None
    return halves_of_pairs(cfg.num_heads, cfg.head_dim, 2 * len(cfg.rope.frequencies))


WEIGHTS = WeightTable(
    prefixes=("transformer.",),
    names={
        "wte": "embed_tokens",
        "h.*.ln_1": "layers.*.input_layernorm",
        **{f"h.*.attn.{part}_proj": f"layers.*.self_attn.{part}_proj" for part in "qkv"},
        "h.*.attn.out_proj": "layers.*.self_attn.o_proj",
        "h.*.mlp.fc_in": "layers.*.mlp.up_proj",
        "h.*.mlp.fc_out": "layers.*.mlp.down_proj",
        "ln_f": "norm",
    },
    transforms=tuple(Permute(f"layers.*.self_attn.{part}_proj", _order) for part in "qk"),
)


class Config(ClassicConfig):
    """GPT-J's configuration. `rotary_dim` columns of each head rotate."""

    __slots__ = ()

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:  # noqa: ARG003
        raise ModelLoadError("GGUF has no standard for GPT-J; use the safetensors checkpoint")

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        config = cls.read_hf(reader, tied=False, block="parallel", mlp_norm="input_layernorm")
        rotary_dim = reader.integer("rotary_dim", low=2, high=config.head_dim)
        if rotary_dim % 2:
            raise reader.error("rotary_dim", rotary_dim, "must be even")
        return replace(config, rope=scaled(rotary_dim, 10000.0))
