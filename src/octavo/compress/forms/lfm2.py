"""LFM2 as a GGUF file."""

from __future__ import annotations

import numpy as np

from octavo.compress.forms._gguf import GGUFForm, Keys, decoder_keys
from octavo.models._reading import ConfigReader
from octavo.models.lfm2 import Config


def lfm2_keys(cfg: Config, reader: ConfigReader) -> Keys:
    """Return the keys. A layer without kv heads is a convolution. Raises ModelLoadError if convolutions have biases."""
    if reader.flag("conv_bias", False):
        raise reader.error("conv_bias", True, "GGUF files have no place for the biases of convolutions")
    if reader.has("layer_types"):
        attends = [kind == "full_attention" for kind in reader.texts("layer_types", cfg.num_layers)]
    else:
        listed = reader.value("full_attn_idxs")
        attends = [not isinstance(listed, list) or layer in listed for layer in range(cfg.num_layers)]
    return {
        **decoder_keys(cfg, reader, theta=1e6),
        "attention.head_count_kv": np.array([cfg.num_kv_heads * here for here in attends], np.int32),
        "shortconv.l_cache": reader.integer("conv_L_cache", 3),
    }


GGUF = GGUFForm("lfm2", lfm2_keys)
