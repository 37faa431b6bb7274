"""GLM 4 (2024) and ChatGLM 3 as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, decoder_keys
from octavo.models._reading import ConfigReader
from octavo.models.chatglm import Config, as_glm


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    return decoder_keys(cfg, as_glm(reader))


GGUF = GGUFForm("chatglm", _keys)
