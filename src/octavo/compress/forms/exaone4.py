"""EXAONE 4 as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, decoder_keys, gguf_pattern
from octavo.models._reading import ConfigReader
from octavo.models.exaone4 import PATTERN, Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    keys = decoder_keys(cfg, reader)
    return keys if set(cfg.attention.windows) == {None} else keys | gguf_pattern(cfg, PATTERN)


GGUF = GGUFForm("exaone4", _keys)
