"""Nemotron 3 and 4, dense, as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, decoder_keys
from octavo.models._reading import ConfigReader
from octavo.models.nemotron import Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    return decoder_keys(cfg, reader, norm_eps="attention.layer_norm_epsilon")


GGUF = GGUFForm("nemotron", _keys)
