"""Falcon H1 as a GGUF file, with the multipliers applied to its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.compress.forms._gguf import GGUFForm, Keys, Sources, Stored, decoder_keys, scan_keys
from octavo.models._mamba import mamba_rows
from octavo.models._reading import ConfigReader
from octavo.models._weights import ScaledRows
from octavo.models.falcon_h1 import Config, Multipliers, row_factors

_ATTENTION, _MLP, _MAMBA = "layers.*.self_attn.", "layers.*.mlp.", "layers.*.mamba."


def _stored(cfg: Config, reader: ConfigReader, weights: Sources) -> Stored:
    for key in ("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias"):
        if reader.flag(key, False):
            raise reader.error(key, True, "GGUF files of this architecture have no place for the biases of projections")
    factors, heads = cfg.multipliers, cfg.num_heads * cfg.head_dim
    scale = cfg.attention.scale
    keys = 1.0 if scale is None else scale * cfg.head_dim**0.5
    kv = cfg.num_kv_heads * cfg.head_dim
    rows = {
        "embed_tokens": (cfg.vocab_size, factors.embedding),
        cfg.output_head: (cfg.vocab_size, factors.head),
        _ATTENTION + "q_proj": (heads, factors.attention_in),
        _ATTENTION + "k_proj": (kv, factors.attention_in * keys),
        _ATTENTION + "v_proj": (kv, factors.attention_in),
        _ATTENTION + "o_proj": (cfg.hidden_size, factors.attention_out),
        _MLP + "gate_proj": (cfg.mlp.intermediate_size, factors.mlp_gate),
        _MLP + "down_proj": (cfg.hidden_size, factors.mlp_down),
        _MAMBA + "out_proj": (cfg.hidden_size, factors.ssm_out),
    }
    if cfg.tie_word_embeddings and factors.embedding != factors.head:
        raise reader.error("lm_head_multiplier", factors.head, "a tied head has the multiplier of the embedding")
    steps = [ScaledRows(stem, _constant(*row)) for stem, row in rows.items() if row[1] != 1.0]
    of_scan = factors.ssm_in * _scan_factors(cfg)
    steps += [
        ScaledRows(_MAMBA + "in_proj", lambda _: of_scan.astype(np.float32)),
        ScaledRows(_MAMBA + "conv1d", lambda _: 1.0 / row_factors(cfg)),  # a checkpoint's weights contain the factors
    ]
    config = replace(cfg, multipliers=Multipliers(), attention=replace(cfg.attention, scale=None))
    return Stored(config, weights, tuple(steps))


def _constant(rows: int, factor: float) -> Callable[[Any], NDArray[np.float32]]:
    return lambda _: np.full(rows, factor, np.float32)


def _scan_factors(cfg: Config) -> NDArray[np.float64]:
    """Return the factor of each row of the state space's input projection: the gate, then x, b and c, then the
    steps.
    """
    inner, _, heads = mamba_rows(cfg.scan)
    gate, *_, step = cfg.multipliers.ssm
    return np.concatenate([np.full(inner, gate), row_factors(cfg), np.full(heads, step)])


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    return {**decoder_keys(cfg, reader), **scan_keys(cfg.scan, reader.integer("mamba_d_conv", 4))}


GGUF = GGUFForm(
    "falcon-h1", _keys, stored=_stored, stems=lambda _: {"layers.*.post_attention_layernorm.weight": "blk.*.ffn_norm"}
)
