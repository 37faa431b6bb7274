"""Mamba 2 as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, scan_keys, stateful_keys
from octavo.models._reading import ConfigReader
from octavo.models.mamba2 import Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    return {**stateful_keys(cfg), **scan_keys(cfg.scan, reader.integer("conv_kernel", 4))}


GGUF = GGUFForm("mamba2", _keys)
