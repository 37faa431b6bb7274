"""Mamba 1 and Falcon Mamba as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, channel_keys, stateful_keys
from octavo.models._reading import ConfigReader
from octavo.models.mamba import Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    return {
        **stateful_keys(cfg),
        **channel_keys(cfg.channels, reader.integer("conv_kernel", 4)),
        "ssm.dt_b_c_rms": cfg.inner_eps is not None,
    }


GGUF = GGUFForm("mamba", _keys)
