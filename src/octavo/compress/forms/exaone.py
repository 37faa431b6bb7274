"""EXAONE 3 and 3.5 as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, decoder_keys
from octavo.models._reading import ConfigReader
from octavo.models.exaone import Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    return decoder_keys(cfg, reader, theta=500_000.0)


GGUF = GGUFForm("exaone", _keys)
