"""OLMoE as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, decoder_keys
from octavo.models._reading import ConfigReader
from octavo.models.olmoe import Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    keys = decoder_keys(cfg, reader)
    if cfg.mlp.experts is not None and cfg.mlp.experts.normalize:
        keys["expert_weights_norm"] = True
    if cfg.attention.qkv_limit is not None:
        keys["attention.clamp_kqv"] = cfg.attention.qkv_limit
    return keys


GGUF = GGUFForm("olmoe", _keys)
