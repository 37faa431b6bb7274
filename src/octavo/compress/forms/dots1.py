"""dots.llm1 as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, decoder_keys, routing_keys
from octavo.models._reading import ConfigReader
from octavo.models.dots1 import Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    return {**decoder_keys(cfg, reader), **routing_keys(cfg, reader)}


GGUF = GGUFForm("dots1", _keys)
