"""StarCoder 2 as a GGUF file and as a transformers checkpoint."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, layer_norm_keys
from octavo.compress.forms._hf import HFForm, JSONObject, decoder_json
from octavo.models._decoder import DecoderConfig
from octavo.models._reading import ConfigReader


def _json(cfg: DecoderConfig, reader: ConfigReader) -> JSONObject:
    keys = decoder_json(cfg, reader, norm_eps="norm_epsilon")
    return {**keys, "hidden_act": "gelu_pytorch_tanh", "sliding_window": cfg.attention.windows[0]}


GGUF = GGUFForm("starcoder2", layer_norm_keys)
HF = HFForm("starcoder2", "Starcoder2ForCausalLM", _json)
