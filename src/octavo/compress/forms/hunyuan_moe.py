"""Hunyuan with experts as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys
from octavo.compress.forms.hunyuan_dense import hunyuan_keys
from octavo.models._reading import ConfigReader
from octavo.models.hunyuan_moe import Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    width = cfg.mlp.intermediate_size
    lengths = ("expert_feed_forward_length", "expert_shared_feed_forward_length")
    return {**hunyuan_keys(cfg, reader), **dict.fromkeys(lengths, width)}


GGUF = GGUFForm("hunyuan-moe", _keys)
