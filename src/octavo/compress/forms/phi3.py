"""Phi 3 and 4 as a GGUF file and as a transformers checkpoint."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, decoder_keys
from octavo.compress.forms._hf import HFForm, JSONObject, decoder_json
from octavo.models._decoder import DecoderConfig
from octavo.models._reading import ConfigReader


def _json(cfg: DecoderConfig, reader: ConfigReader) -> JSONObject:
    keys = decoder_json(cfg, reader) | {"sliding_window": cfg.attention.windows[0]}
    if cfg.rope.original_length:
        keys["original_max_position_embeddings"] = cfg.rope.original_length
    return keys


GGUF = GGUFForm("phi3", decoder_keys)
HF = HFForm("phi3", "Phi3ForCausalLM", _json)
