"""InternLM 2 and 2.5 as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, decoder_keys
from octavo.models._reading import ConfigReader
from octavo.models.internlm2 import Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    return decoder_keys(cfg, reader, theta=1e6)


GGUF = GGUFForm("internlm2", _keys)
