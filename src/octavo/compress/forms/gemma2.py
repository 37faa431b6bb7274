"""Gemma 2 as a GGUF file and as a transformers checkpoint, and the keys of config.json that Gemma 3 shares."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, decoder_keys, gguf_pattern
from octavo.compress.forms._hf import HFForm, JSONObject, decoder_json, window_json
from octavo.models._reading import ConfigReader
from octavo.models.gemma2 import Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    keys = decoder_keys(cfg, reader) | gguf_pattern(cfg, 2)
    if cfg.attention.softcap is not None:
        keys["attn_logit_softcapping"] = cfg.attention.softcap
    if cfg.logit_softcap is not None:
        keys["final_logit_softcapping"] = cfg.logit_softcap
    return keys


def gemma_json(cfg: Config, reader: ConfigReader) -> JSONObject:
    """Return the keys of config.json that Gemma 2 and 3 share."""
    keys = decoder_json(cfg, reader) | window_json(cfg)
    gelu = "gelu_pytorch_tanh"
    assert cfg.attention.scale is not None
    scale = {"query_pre_attn_scalar": round(cfg.attention.scale**-2), "final_logit_softcapping": cfg.logit_softcap}
    return {**keys, "hidden_act": gelu, "hidden_activation": gelu, **scale}


def _json(cfg: Config, reader: ConfigReader) -> JSONObject:
    return gemma_json(cfg, reader) | {"attn_logit_softcapping": cfg.attention.softcap}


GGUF = GGUFForm("gemma2", _keys)
HF = HFForm("gemma2", "Gemma2ForCausalLM", _json)
