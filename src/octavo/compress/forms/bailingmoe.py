"""Ling and Ring 1 as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, decoder_keys
from octavo.models._reading import ConfigReader
from octavo.models.bailingmoe import Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    routing = cfg.mlp.experts
    return {
        **decoder_keys(cfg, reader),
        "leading_dense_block_count": cfg.mlp.first_experts or 0,
        "expert_shared_count": reader.integer("num_shared_experts", 0, low=0),
        "expert_weights_norm": routing is not None and routing.normalize,
        "expert_weights_scale": 1.0,
    }


GGUF = GGUFForm("bailingmoe", _keys)
