"""The text model of Llama 4 as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, decoder_keys
from octavo.models._reading import ConfigReader
from octavo.models.llama4 import Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    """Return the keys. The usual key for the MLP's width describes the layers without experts."""
    width = cfg.mlp.intermediate_size
    keys: Keys = {
        **decoder_keys(cfg, reader, theta=500_000.0),
        "feed_forward_length": reader.integer("intermediate_size_mlp", 16384),
        "expert_feed_forward_length": width,
        "interleave_moe_layer_step": _step(reader, cfg.num_layers),
    }
    if set(cfg.attention.windows) == {None}:
        keys["attention.sliding_window"] = 0
    return keys


def _step(reader: ConfigReader, num_layers: int) -> int:
    """Return n if every n-th layer has experts. Raises ModelLoadError if the layers follow no such pattern."""
    step = reader.integer("interleave_moe_layer_step", 1)
    layers = reader.value("moe_layers")
    if layers and layers != list(range(step - 1, num_layers, step)):
        raise reader.error("moe_layers", layers, f"GGUF files express experts only in every n-th layer, here {step}")
    return step


GGUF = GGUFForm("llama4", _keys)
