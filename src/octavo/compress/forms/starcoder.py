"""StarCoder and SantaCoder as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, classic_keys
from octavo.models._classic import ClassicConfig
from octavo.models._reading import ConfigReader


def _keys(cfg: ClassicConfig, reader: ConfigReader) -> Keys:
    return {**classic_keys(cfg, reader), "attention.head_count_kv": cfg.num_kv_heads}


GGUF = GGUFForm("starcoder", _keys)
