"""GPT-NeoX and Pythia as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, classic_keys
from octavo.models._reading import ConfigReader
from octavo.models.gptneox import Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    return {**classic_keys(cfg, reader), "use_parallel_residual": cfg.block == "parallel"}


GGUF = GGUFForm("gptneox", _keys)
