"""Command R and R+ as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, decoder_keys
from octavo.models._reading import ConfigReader
from octavo.models.cohere import Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    keys = decoder_keys(cfg, reader, norm_eps="attention.layer_norm_epsilon")
    return {**keys, "logit_scale": cfg.logit_scale}


GGUF = GGUFForm("command-r", _keys)
