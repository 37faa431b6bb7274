"""MPT as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, classic_keys
from octavo.models._reading import ConfigReader
from octavo.models.mpt import Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    max_bias = reader.section("attn_config").number("alibi_bias_max", 8.0, high=64.0)
    keys: Keys = {**classic_keys(cfg, reader), "attention.max_alibi_bias": max_bias}
    return keys if cfg.qkv_limit is None else keys | {"attention.clamp_kqv": cfg.qkv_limit}


GGUF = GGUFForm("mpt", _keys)
