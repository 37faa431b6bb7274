"""MiMo V2 Flash as a GGUF file."""

from __future__ import annotations

import numpy as np

from octavo.compress.forms._gguf import GGUFForm, Keys, rope_keys, routed_keys
from octavo.models._reading import ConfigReader
from octavo.models.mimo_v2_flash import THETA, Config, rope_sections


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    windows = cfg.attention.windows
    full, local = rope_sections(reader, cfg.head_dim)
    heads = [cfg.num_kv_heads if window is None else cfg.local_kv_heads for window in windows]
    return {
        **routed_keys(cfg, reader),
        "leading_dense_block_count": _num_dense_layers(reader),
        **rope_keys(cfg.rope.params, cfg.max_position_embeddings, full, THETA),
        "rope.freq_base_swa": local.number("rope_theta"),
        "attention.head_count_kv": np.array(heads, np.int32),
        "attention.sliding_window": next((window for window in windows if window is not None), 1),
        "attention.sliding_window_pattern": np.array([window is not None for window in windows]),
        "attention.value_scale": cfg.value_scale,
    }


def _num_dense_layers(reader: ConfigReader) -> int:
    """Return the number of layers without experts. They come before all other layers.

    They are listed in transformers' `mlp_layer_types` or in the authors' `moe_layer_freq`, where 0 marks such a layer.
    """
    kinds = reader.value("mlp_layer_types") or reader.value("moe_layer_freq")
    return sum(kind in ("dense", 0) for kind in kinds) if isinstance(kinds, list) else 0


GGUF = GGUFForm("mimo2", _keys)
