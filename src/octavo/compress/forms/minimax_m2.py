"""MiniMax M2 as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, decoder_keys
from octavo.models._reading import ConfigReader
from octavo.models.minimax_m2 import Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    width = cfg.mlp.intermediate_size
    keys = decoder_keys(cfg, reader, theta=5e6)
    return {**keys, "expert_feed_forward_length": width, "expert_gating_func": 2}


GGUF = GGUFForm("minimax-m2", _keys)
