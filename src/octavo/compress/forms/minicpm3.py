"""MiniCPM 3 as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, decoder_keys
from octavo.models._reading import ConfigReader
from octavo.models.minicpm3 import Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    """Return the keys. The keys for sizes describe the heads, not the cache."""
    keys: Keys = {
        **decoder_keys(cfg, reader),
        "attention.head_count_kv": cfg.num_heads,
        "attention.key_length": cfg.nope_dim + cfg.rope_dim,
        "attention.value_length": cfg.head_value_dim,
        "attention.kv_lora_rank": cfg.latent_dim,
    }
    if reader.has("q_lora_rank"):
        keys["attention.q_lora_rank"] = reader.integer("q_lora_rank")
    return keys


GGUF = GGUFForm("minicpm3", _keys)
