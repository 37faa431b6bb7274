"""The text model of Gemma 4 as a GGUF file."""

from __future__ import annotations

import numpy as np

from octavo.compress.forms._gguf import GGUFForm, Keys, decoder_keys
from octavo.models._per_layer import text_section
from octavo.models._reading import ConfigReader
from octavo.models.gemma4 import DEFAULTS, GLOBAL_THETA, LOCAL_THETA, Config, global_section


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    """Return the keys. Keys without a suffix describe the layers with global attention."""
    reader = text_section(reader, DEFAULTS)
    windows, dim = cfg.attention.windows, cfg.global_head_dim
    local = reader.section("rope_parameters").section("sliding_attention")
    is_own = [source == layer for layer, source in enumerate(cfg.sources)]
    keys: Keys = {
        **decoder_keys(cfg, reader, rope=global_section(reader), theta=GLOBAL_THETA),
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.key_length_swa": cfg.head_dim,
        "attention.value_length_swa": cfg.head_dim,
        "attention.head_count_kv": np.array(
            [cfg.global_kv_heads if window is None else cfg.num_kv_heads for window in windows], np.int32
        ),
        "attention.sliding_window": next((window for window in windows if window is not None), 512),
        "attention.sliding_window_pattern": np.array([window is not None for window in windows]),
        "attention.shared_kv_layers": is_own.count(False),
        "rope.dimension_count_swa": cfg.head_dim,
        "rope.freq_base_swa": local.number("rope_theta", LOCAL_THETA, low=1.0),
        "embedding_length_per_layer_input": cfg.input_width,
        "final_logit_softcapping": cfg.logit_softcap or 0.0,  # llama.cpp takes 30 where there is none
    }
    if reader.flag("use_double_wide_mlp", False) and not all(is_own):  # otherwise no MLP is double
        width = cfg.mlp.intermediate_size
        keys["feed_forward_length"] = np.array([width // 2 if own else width for own in is_own], np.int32)
    return keys


GGUF = GGUFForm("gemma4", _keys)
