"""Granite 4 as a GGUF file."""

from __future__ import annotations

import numpy as np

from octavo.compress.forms._gguf import GGUFForm, Keys, scan_keys
from octavo.compress.forms.granite import granite_keys
from octavo.models._reading import ConfigReader
from octavo.models.granitehybrid import SHARED, Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    """Return the keys. Layers with 0 kv heads are state-space layers.

    In a model without experts, the width of the shared MLP is stored as the width of the ordinary MLP.
    """
    kinds = reader.texts("layer_types", cfg.num_layers)
    heads = [cfg.num_kv_heads if kind in ("attention", "full_attention") else 0 for kind in kinds]
    keys: Keys = {
        **granite_keys(cfg, reader),
        "attention.head_count_kv": np.array(heads, np.int32),
        **scan_keys(cfg.scan, reader.integer("mamba_d_conv", 4)),
        "rope.scaling.finetuned": cfg.rope.rotates is None or all(cfg.rope.rotates),
    }
    if cfg.mlp.experts is None:
        return keys | {"feed_forward_length": cfg.shared_size}
    return keys | {"expert_shared_feed_forward_length": cfg.shared_size}


def _stems(cfg: Config) -> dict[str, str]:
    kind = "" if cfg.mlp.experts is None else "_shexp"
    return {f"{SHARED}{part}_proj": f"blk.*.ffn_{part}{kind}" for part in ("gate", "up", "down")}


GGUF = GGUFForm("granitehybrid", _keys, stems=_stems)
