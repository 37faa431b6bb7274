"""Mixtral as a GGUF file. In files, its architecture is called llama."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, decoder_keys
from octavo.models._decoder import DecoderConfig
from octavo.models._reading import ConfigReader
from octavo.models.mixtral import THETA


def _keys(cfg: DecoderConfig, reader: ConfigReader) -> Keys:
    return decoder_keys(cfg, reader, theta=THETA)


GGUF = GGUFForm("llama", _keys)
