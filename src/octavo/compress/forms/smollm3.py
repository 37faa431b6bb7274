"""SmolLM 3 as a GGUF file and as a transformers checkpoint."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, decoder_keys
from octavo.compress.forms._hf import HFForm, JSONObject, decoder_json
from octavo.models._reading import ConfigReader
from octavo.models.smollm3 import THETA, Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    return decoder_keys(cfg, reader, theta=THETA)


def _json(cfg: Config, reader: ConfigReader) -> JSONObject:
    return {**decoder_json(cfg, reader), "no_rope_layers": [int(rotates) for rotates in cfg.rope.rotates or ()]}


GGUF = GGUFForm("smollm3", _keys)
HF = HFForm("smollm3", "SmolLM3ForCausalLM", _json)
