"""RWKV 7 as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, Sources, Stored
from octavo.models._reading import ConfigReader
from octavo.models.rwkv7 import Config

_RANKS = {
    "decay_low_rank_dim": "decay_lora_rank",
    "a_low_rank_dim": "iclr_lora_rank",
    "v_low_rank_dim": "value_residual_mix_lora_rank",
    "gate_low_rank_dim": "gate_lora_rank",
}


def _stored(cfg: Config, reader: ConfigReader, weights: Sources) -> Stored:  # noqa: ARG001
    """Return the model as the file stores it.

    llama.cpp requires the weights of a value mix in the first layer but does not use them. The weights of the layer's
    learning rates, `attn.a_*`, are written in their place.
    """
    parts = ("in.weight", "out.weight", "out.bias")
    unused = {f"layers.0.attn.v_{part}": weights[f"layers.0.attn.a_{part}"] for part in parts}
    return Stored(cfg, {**unused, **weights})


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    return {
        "block_count": cfg.num_layers,
        "context_length": cfg.max_position_embeddings,
        "embedding_length": cfg.hidden_size,
        "feed_forward_length": cfg.width,
        "attention.head_count": 0,
        "attention.layer_norm_epsilon": cfg.norm_eps,
        "wkv.head_size": cfg.head_dim,
        "token_shift_count": 2,
        **{f"attention.{key}": reader.integer(name) for name, key in _RANKS.items()},
    }


GGUF = GGUFForm("rwkv7", _keys, stored=_stored)
