"""Qwen 1 as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, decoder_keys
from octavo.models._reading import ConfigReader
from octavo.models.qwen import Config, as_llama


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    return {**decoder_keys(cfg, as_llama(reader)), "feed_forward_length": 2 * cfg.mlp.intermediate_size}


GGUF = GGUFForm("qwen", _keys)
