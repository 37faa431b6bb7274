"""Ling and Ring 2 as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, routed_keys
from octavo.models._reading import ConfigReader
from octavo.models.bailingmoe2 import Config, as_grouped


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    return routed_keys(cfg, as_grouped(reader))


GGUF = GGUFForm("bailingmoe2", _keys)
