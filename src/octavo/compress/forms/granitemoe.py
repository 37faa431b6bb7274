"""Granite 3 with experts as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys
from octavo.compress.forms.granite import granite_keys
from octavo.models._reading import ConfigReader
from octavo.models.granitemoe import Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    keys = granite_keys(cfg, reader)
    return {**keys, "expert_shared_feed_forward_length": cfg.shared_size} if cfg.shared_size else keys


GGUF = GGUFForm("granitemoe", _keys)
