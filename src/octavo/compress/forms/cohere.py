"""Command R and R+ as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, layer_norm_keys
from octavo.models._reading import ConfigReader
from octavo.models.cohere import Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    keys = layer_norm_keys(cfg, reader)
    return {**keys, "logit_scale": cfg.logit_scale}


GGUF = GGUFForm("command-r", _keys)
