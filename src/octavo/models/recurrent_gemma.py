"""RecurrentGemma: gated linear recurrences in two of every three layers, local attention in the third.

Griffin, arXiv 2402.19427.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.graph.builder import Graph
from octavo.graph.ops.rowwise import GatedActivation
from octavo.graph.values import Value
from octavo.models._attention import AttentionConfig, same_windows
from octavo.models._decoder import DecoderConfig
from octavo.models._layers import attention, gated_mlp
from octavo.models._mlp import MLPConfig
from octavo.models._reading import ConfigReader
from octavo.models._weights import Flatten, Fold, Softplus, Transpose, WeightTable

_KIND = "gelu_tanh"
_POSITIONS = 8192  # context length in training; config.json has no limit
_GATES = ("input", "recurrent")
_BLOCK, _LRU = "layers.*.temporal_block.", "layers.*.recurrent."

WEIGHTS = WeightTable(
    names={
        "final_norm": "norm",
        "layers.*.temporal_pre_norm": "layers.*.input_layernorm",
        "layers.*.channel_pre_norm": "layers.*.post_attention_layernorm",
        **{f"layers.*.mlp_block.{part}_proj": f"layers.*.mlp.{part}_proj" for part in ("gate", "up", "down")},
        **{f"{_BLOCK}{part}_proj": f"layers.*.self_attn.{part}_proj" for part in "qkvo"},
        **{_BLOCK + part: _LRU + part for part in ("linear_x", "linear_y", "linear_out", "conv_1d")},
        _BLOCK + "rg_lru.recurrent_param": _LRU + "decay.weight",
        **{f"{_BLOCK}rg_lru.{gate}_gate_weight": f"{_LRU}{gate}_gate.weight" for gate in _GATES},
        **{f"{_BLOCK}rg_lru.{gate}_gate_bias": f"{_LRU}{gate}_bias.weight" for gate in _GATES},
    },
    transforms=(
        Flatten(_LRU + "conv_1d"),
        Softplus(_LRU + "decay"),
        *(Transpose(f"{_LRU}{gate}_gate") for gate in _GATES),  # [heads, in, out]
        *(Flatten(f"{_LRU}{gate}_bias") for gate in _GATES),
        *(Fold(stem, 1.0) for stem in ("norm", "layers.*.input_layernorm", "layers.*.post_attention_layernorm")),
    ),
)


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """RecurrentGemma's configuration. Layers that have recurrence weights have no attention."""

    logit_softcap: float = 30.0

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        width = reader.integer("intermediate_size", 7680, low=2)
        reader = reader.replaced("intermediate_size", width // 2)
        reader = reader.with_defaults(
            {"partial_rotary_factor": 0.5, "tie_word_embeddings": True, "max_position_embeddings": _POSITIONS}
        )
        kinds = reader.value("block_types")
        for kind in kinds if isinstance(kinds, list) else ():
            if kind not in ("recurrent", "attention"):
                raise reader.error("block_types", kind, "must be recurrent or attention")
        return cls.read_hf(
            reader,
            attention=AttentionConfig(same_windows(reader, reader.integer("attention_window_size", 2048))),
            mlp=MLPConfig.from_hf(reader, activation=("gelu_pytorch_tanh", "gelu_new", "gelu_fast")),
            logit_softcap=reader.number("logits_soft_cap", 30.0),
        )


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    h = g.embedding("embed_tokens") * _as_bfloat16(cfg.hidden_size**0.5)
    for i in range(cfg.num_layers):
        x = g.rms_norm(h, f"layers.{i}.input_layernorm", cfg.norm_eps)
        is_recurrent = f"layers.{i}.recurrent.decay.weight" in g.weights
        h = h + (_recurrent_block(g, x, f"layers.{i}.recurrent") if is_recurrent else attention(g, x, cfg, i))
        x = g.rms_norm(h, f"layers.{i}.post_attention_layernorm", cfg.norm_eps)
        h = h + gated_mlp(g, x, f"layers.{i}.mlp", _KIND)
    h = g.rms_norm(g.select_rows(h), "norm", cfg.norm_eps)
    return g.logits(h, cfg.output_head, softcap=cfg.logit_softcap)


def _recurrent_block(g: Graph, x: Value, stem: str) -> Value:
    """Build the recurrence and its gate, using the weights under `stem`: [TOKENS, hidden]."""
    u = g.short_conv(g.linear(x, f"{stem}.linear_x"), f"{stem}.conv_1d")
    out = g.add(GatedActivation(g.linear(x, f"{stem}.linear_y"), g.real_gated_recurrence(u, stem), _KIND))
    return g.linear(out, f"{stem}.linear_out")


def _as_bfloat16(number: float) -> float:
    """Round to the nearest bfloat16: transformers stores the embedding factor in that type."""
    bits = np.float32(number).view(np.uint32)
    return float(((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32))
