"""Llama as a GGUF file and as a transformers checkpoint."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, decoder_keys
from octavo.compress.forms._hf import HFForm, JSONObject, decoder_json
from octavo.models._decoder import DecoderConfig
from octavo.models._reading import ConfigReader


def _json(cfg: DecoderConfig, reader: ConfigReader) -> JSONObject:
    keys = decoder_json(cfg, reader)
    if cfg.mlp.experts is None:
        return keys
    raise reader.error("expert_count", reader.integer("expert_count"), "cannot be converted back to safetensors yet")


GGUF = GGUFForm("llama", decoder_keys)
HF = HFForm("llama", "LlamaForCausalLM", _json)
