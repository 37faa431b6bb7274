"""Falcon 1 and 2 as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, classic_keys
from octavo.models._reading import ConfigReader
from octavo.models.falcon import Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    """Return the keys.

    Raises ModelLoadError if there are biases, which llama.cpp does not read for this architecture.
    """
    if reader.flag("bias", False):
        raise reader.error("bias", True, "GGUF files have no place for the biases of Falcon")
    return {**classic_keys(cfg, reader), "attention.head_count_kv": cfg.num_kv_heads}


GGUF = GGUFForm("falcon", _keys)
