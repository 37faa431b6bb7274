"""Command R7B and A as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, gguf_pattern, layer_norm_keys
from octavo.models._reading import ConfigReader
from octavo.models.cohere2 import PATTERN, Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    keys = layer_norm_keys(cfg, reader)
    return {**keys, **gguf_pattern(cfg, PATTERN), "logit_scale": cfg.logit_scale}


GGUF = GGUFForm("cohere2", _keys)
