"""DeepSeek V2 and V3, Kimi K2 and GLM 4.7 Flash as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, routed_keys
from octavo.models._reading import ConfigReader
from octavo.models._rope import rope_section
from octavo.models.deepseek2 import Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    """The usual keys have the lengths of the cache; those of the heads follow."""
    keys: Keys = {
        **routed_keys(cfg, reader),
        "attention.kv_lora_rank": cfg.latent_dim,
        "attention.key_length_mla": cfg.nope_dim + cfg.rope_dim,
        "attention.value_length_mla": cfg.head_value_dim,
    }
    if reader.has("q_lora_rank"):
        keys["attention.q_lora_rank"] = reader.integer("q_lora_rank")
    section = rope_section(reader)
    if "rope.scaling.factor" in keys and (mscale := section.number("mscale_all_dim", 0.0, low=-1.0)) > 0:
        # A reader takes the factor of attention from this one, and has none beside it.
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * mscale
        keys.pop("rope.scaling.attn_factor", None)
    return keys


GGUF = GGUFForm("deepseek2", _keys)
