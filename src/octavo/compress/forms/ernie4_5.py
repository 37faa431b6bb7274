"""ERNIE 4.5, dense and with experts, as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, decoder_keys
from octavo.models._reading import ConfigReader
from octavo.models.ernie4_5 import Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    keys = decoder_keys(cfg, reader, theta=500_000.0)
    if cfg.mlp.experts is None:
        return keys
    for key, value in (("moe_layer_interval", 1), ("moe_layer_end_index", cfg.num_layers - 1)):
        if (found := reader.values.get(reader.prefix + key, value)) not in (value, -1):
            raise reader.error(key, found, f"must be {value} in a GGUF file")
    shared = reader.integer("moe_num_shared_experts", 2, low=0)
    if shared:
        keys["expert_shared_feed_forward_length"] = shared * reader.integer("moe_intermediate_size")
    return {
        **keys,
        "interleave_moe_layer_step": 1,
        "leading_dense_block_count": reader.integer("moe_layer_start_index", 1, low=0),
        "expert_shared_count": shared,
    }


GGUF = GGUFForm(lambda cfg: "ernie4_5" if cfg.mlp.experts is None else "ernie4_5-moe", _keys)
