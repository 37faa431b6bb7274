"""Mistral as a GGUF file.

In files, its architecture is called llama, or mistral3 if it has the scaled queries of Ministral 3.
"""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, decoder_keys
from octavo.models._reading import ConfigReader
from octavo.models._rope import rope_section
from octavo.models.mistral import Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    keys = decoder_keys(cfg, reader)
    if cfg.attention.query_growth is None:
        return keys
    section = rope_section(reader)
    keys["attention.temperature_scale"] = section.number("llama_4_scaling_beta")
    keys["rope.scaling.original_context_length"] = cfg.attention.query_growth.length
    if section.has("mscale_all_dim"):
        # Readers take the factor of attention from it.
        keys.pop("rope.scaling.attn_factor", None)
        keys["rope.scaling.yarn_log_multiplier"] = section.number("mscale_all_dim")
    return keys


GGUF = GGUFForm(lambda cfg: "llama" if cfg.attention.query_growth is None else "mistral3", _keys)
