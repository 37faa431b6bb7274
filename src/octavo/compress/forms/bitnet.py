"""BitNet as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, decoder_keys
from octavo.models._reading import ConfigReader
from octavo.models.bitnet import Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    return decoder_keys(cfg, reader, theta=500000.0)


# llama.cpp computes silu for the first name; the authors' own programs read the second.
GGUF = GGUFForm(lambda cfg: "bitnet" if cfg.kind == "silu" else "bitnet-b1.58", _keys)
