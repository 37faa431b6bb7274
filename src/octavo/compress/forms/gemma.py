"""Gemma 1 as a GGUF file and as a transformers checkpoint."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, decoder_keys
from octavo.compress.forms._hf import HFForm, JSONObject, decoder_json
from octavo.models._decoder import DecoderConfig
from octavo.models._reading import ConfigReader


def _json(cfg: DecoderConfig, reader: ConfigReader) -> JSONObject:
    return decoder_json(cfg, reader) | {"hidden_act": "gelu_pytorch_tanh"}


GGUF = GGUFForm("gemma", decoder_keys)
HF = HFForm("gemma", "GemmaForCausalLM", _json)
