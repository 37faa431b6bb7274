"""InternLM 2 and 2.5: Llama with q, k and v in one matrix, grouped by kv head. Cai et al., arXiv 2403.17297."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.models._attention import AttentionConfig, same_windows
from octavo.models._decoder import DecoderConfig, hf_rope
from octavo.models._reading import ConfigReader
from octavo.models._weights import Permute, WeightTable, fused_qkv, rotary_pairs
from octavo.models.llama import build

__all__ = ["WEIGHTS", "Config", "build"]

_LAYER = "layers.*."


def _heads_apart(cfg: Any) -> NDArray[np.intp]:
    """Return the stored row for each row of q, then of k, then of v, for files that group them by kv head."""
    group = cfg.num_heads // cfg.num_kv_heads
    rows = np.arange((cfg.num_heads + 2 * cfg.num_kv_heads) * cfg.head_dim).reshape(-1, group + 2, cfg.head_dim)
    return np.concatenate([rows[:, part].reshape(-1) for part in (slice(group), group, group + 1)])


WEIGHTS = WeightTable(
    names={
        "tok_embeddings": "embed_tokens",
        "output": "lm_head",
        _LAYER + "attention_norm": _LAYER + "input_layernorm",
        _LAYER + "ffn_norm": _LAYER + "post_attention_layernorm",
        _LAYER + "attention.wqkv": _LAYER + "self_attn.qkv_proj",
        _LAYER + "attention.wo": _LAYER + "self_attn.o_proj",
        _LAYER + "feed_forward.w1": _LAYER + "mlp.gate_proj",
        _LAYER + "feed_forward.w2": _LAYER + "mlp.down_proj",
        _LAYER + "feed_forward.w3": _LAYER + "mlp.up_proj",
    },
    transforms=(
        Permute(_LAYER + "self_attn.qkv_proj", _heads_apart, "safetensors"),
        fused_qkv("safetensors"),
        *rotary_pairs("gguf"),
    ),
)


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """InternLM 2's configuration. Biases are used if the checkpoint has them."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        # Dynamic scaling, which most files request, starts beyond the positions seen in training.
        return cls.read_hf(reader, attention=AttentionConfig(same_windows(reader)), rope=hf_rope(reader, theta=1e6))
