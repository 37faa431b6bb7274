"""OLMo 2 and 3 as a GGUF file. In files, both architectures are called olmo2."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, decoder_keys, gguf_pattern
from octavo.models._reading import ConfigReader
from octavo.models.olmo2 import PATTERN, THETA_3, Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    ropes = reader.section("rope_parameters")
    rope = ropes.section("full_attention") if ropes.has("full_attention") else None
    keys = decoder_keys(cfg, reader, rope=rope, theta=10000.0 if cfg.rope.local is None else THETA_3)
    return keys if set(cfg.attention.windows) == {None} else keys | gguf_pattern(cfg, PATTERN)


GGUF = GGUFForm("olmo2", _keys)
