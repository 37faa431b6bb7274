"""Command R7B and A as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, decoder_keys, gguf_pattern
from octavo.models._reading import ConfigReader
from octavo.models.cohere2 import PATTERN, Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    keys = decoder_keys(cfg, reader, norm_eps="attention.layer_norm_epsilon")
    return {**keys, **gguf_pattern(cfg, PATTERN), "logit_scale": cfg.logit_scale}


GGUF = GGUFForm("cohere2", _keys)
