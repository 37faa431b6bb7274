"""The text model of Gemma 3n as a GGUF file."""

from __future__ import annotations

import math

import numpy as np

from octavo.compress.forms._gguf import GGUFForm, Keys, decoder_keys
from octavo.models._per_layer import text_section, with_widest_mlp
from octavo.models._reading import ConfigReader
from octavo.models.gemma3 import GLOBAL_THETA, LOCAL_THETA, global_rope
from octavo.models.gemma3n import DEFAULTS, Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    reader = text_section(reader, DEFAULTS)
    widths = reader.value("intermediate_size")
    reader = with_widest_mlp(reader, "intermediate_size", "num_hidden_layers")
    windows = cfg.attention.windows
    local = reader.section("rope_parameters").section("sliding_attention")
    theta = local.number("rope_theta", reader.number("rope_local_base_freq", LOCAL_THETA, low=1.0), low=1.0)
    keys: Keys = {
        **decoder_keys(cfg, reader, rope=global_rope(reader), theta=GLOBAL_THETA),
        "attention.sliding_window": next((window for window in windows if window is not None), 512),
        "attention.sliding_window_pattern": np.array([window is not None for window in windows]),
        "attention.shared_kv_layers": sum(source != layer for layer, source in enumerate(cfg.sources)),
        "embedding_length_per_layer_input": cfg.input_width,
        "rope.freq_base_swa": theta,
        "altup.active_idx": cfg.active,
        "altup.num_inputs": cfg.num_streams,
        "activation_sparsity_scale": np.array(
            [-math.inf if deviation is None else deviation for deviation in cfg.deviations], np.float32
        ),
        "final_logit_softcapping": 30.0 if cfg.logit_softcap is None else cfg.logit_softcap,
    }
    return keys | {"feed_forward_length": np.array(widths, np.int32)} if isinstance(widths, list) else keys


GGUF = GGUFForm("gemma3n", _keys)
