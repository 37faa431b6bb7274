"""StarCoder and SantaCoder (GPT-BigCode): GPT-2 with one key and value head for all queries.

Li et al., arXiv 2305.06161.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.models import gpt2
from octavo.models._classic import build, split_qkv
from octavo.models._reading import ConfigReader
from octavo.models._weights import Permute, WeightTable

__all__ = ["WEIGHTS", "Config", "build"]

ALIASES = ("gpt_bigcode",)


def _rows(cfg: Any) -> NDArray[np.intp]:
    """Return the stored row for each row of q, k and v.

    Files group the rows by head, unless all heads share one key and value.
    """
    rows: NDArray[np.intp] = np.arange((cfg.num_heads + 2 * cfg.num_kv_heads) * cfg.head_dim)
    if cfg.num_kv_heads == 1:
        return rows
    by_head: NDArray[np.intp] = rows.reshape(cfg.num_heads, 3, cfg.head_dim).swapaxes(0, 1).reshape(-1)
    return by_head


WEIGHTS = WeightTable(
    prefixes=("transformer.",),
    names=gpt2.WEIGHTS.names,
    transforms=(Permute("layers.*.self_attn.qkv_proj", _rows, "safetensors"), *split_qkv(fused="apart")),
)


class Config(gpt2.Config):
    """StarCoder's configuration, based on GPT-2's. Without `multi_query`, every head has its own keys and values."""

    __slots__ = ()

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        shared = {"num_key_value_heads": 1} if reader.flag("multi_query", True) else {}
        return super().from_hf(reader.with_defaults(shared))
