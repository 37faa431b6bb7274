"""Nemotron H and Nemotron 3 as a GGUF file."""

from __future__ import annotations

import numpy as np

from octavo.compress.forms._gguf import GGUFForm, Keys, decoder_keys, routed_keys, scan_keys
from octavo.models._reading import ConfigReader
from octavo.models.nemotron_h import Config, layer_kinds


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    kinds = layer_kinds(reader)
    if cfg.mlp.experts is None:
        reader = reader.replaced("n_routed_experts", None)
    wide = "-" if cfg.mlp.experts is None else "E"
    shared_keys = decoder_keys if cfg.mlp.experts is None else routed_keys
    keys = {
        **shared_keys(cfg, reader),
        **scan_keys(cfg.scan, reader.integer("conv_kernel", 4)),
        "attention.layer_norm_epsilon": cfg.norm_eps,  # llama.cpp asks for both
        "attention.head_count_kv": np.array([cfg.num_kv_heads * (kind == "*") for kind in kinds], np.int32),
        "feed_forward_length": np.array([cfg.mlp.intermediate_size * (kind == wide) for kind in kinds], np.int32),
    }
    if cfg.mlp.experts is None:
        return keys
    keys["expert_shared_feed_forward_length"] = reader.integer("moe_shared_expert_intermediate_size")
    if reader.has("moe_latent_size"):
        keys["moe_latent_size"] = reader.integer("moe_latent_size")
    return keys


GGUF = GGUFForm(lambda cfg: "nemotron_h" if cfg.mlp.experts is None else "nemotron_h_moe", _keys)
