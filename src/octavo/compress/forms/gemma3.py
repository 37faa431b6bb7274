"""The text model of Gemma 3 as a GGUF file and as a transformers checkpoint."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, decoder_keys, gguf_pattern
from octavo.compress.forms._hf import HFForm, JSONObject
from octavo.compress.forms.gemma2 import gemma_json
from octavo.models._reading import ConfigReader
from octavo.models.gemma3 import GLOBAL_THETA, LOCAL_THETA, PATTERN, Config, global_rope, text_config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    reader = text_config(reader)
    keys = decoder_keys(cfg, reader, rope=global_rope(reader), theta=GLOBAL_THETA)
    local = reader.section("rope_parameters").section("sliding_attention")
    theta = reader.number("rope_local_base_freq", LOCAL_THETA, low=1.0)
    keys["rope.freq_base_swa"] = local.number("rope_theta", theta, low=1.0)
    keys |= gguf_pattern(cfg, PATTERN)
    if cfg.logit_softcap is not None:
        keys["final_logit_softcapping"] = cfg.logit_softcap
    return keys


def _json(cfg: Config, reader: ConfigReader) -> JSONObject:
    theta = reader.number("rope.freq_base_swa", LOCAL_THETA)
    keys = gemma_json(cfg, reader.with_defaults({"rope.freq_base": GLOBAL_THETA}))
    return {**keys, "rope_local_base_freq": float(f"{theta:.7g}")}


GGUF = GGUFForm("gemma3", _keys)
HF = HFForm("gemma3_text", "Gemma3ForCausalLM", _json)
