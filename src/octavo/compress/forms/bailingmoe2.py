"""Ling and Ring 2 as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, decoder_keys, routing_keys
from octavo.models._reading import ConfigReader
from octavo.models.bailingmoe2 import Config, as_grouped


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    reader = as_grouped(reader)
    return {**decoder_keys(cfg, reader), **routing_keys(cfg, reader)}


GGUF = GGUFForm("bailingmoe2", _keys)
