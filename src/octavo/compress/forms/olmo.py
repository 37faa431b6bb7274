"""OLMo 1 as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, layer_norm_keys
from octavo.models._reading import ConfigReader
from octavo.models.olmo import Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    keys = layer_norm_keys(cfg, reader)
    limit = cfg.attention.qkv_limit
    return keys if limit is None else {**keys, "attention.clamp_kqv": limit}


GGUF = GGUFForm("olmo", _keys)
