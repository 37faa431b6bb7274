"""gpt-oss as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, decoder_keys, gguf_pattern
from octavo.models._reading import ConfigReader
from octavo.models.gpt_oss import PATTERN, Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    keys = decoder_keys(cfg, reader, theta=150000.0) | gguf_pattern(cfg, PATTERN)
    return {**keys, "expert_feed_forward_length": cfg.mlp.intermediate_size}


GGUF = GGUFForm("gpt-oss", _keys)
