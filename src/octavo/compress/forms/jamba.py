"""Jamba as a GGUF file."""

from __future__ import annotations

import numpy as np

from octavo.compress.forms._gguf import GGUFForm, Keys, channel_keys, decoder_keys
from octavo.models._reading import ConfigReader
from octavo.models.jamba import Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    period, offset = reader.integer("attn_layer_period", 8), reader.integer("attn_layer_offset", 4, low=0)
    heads = [cfg.num_kv_heads * (layer % period == offset) for layer in range(cfg.num_layers)]
    return {
        **decoder_keys(cfg, reader),
        **channel_keys(cfg.channels, reader.integer("mamba_d_conv", 4)),
        "attention.head_count_kv": np.array(heads, np.int32),
    }


GGUF = GGUFForm("jamba", _keys)
