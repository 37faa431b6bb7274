"""StableLM 2 as a GGUF file and as a transformers checkpoint."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, layer_norm_keys
from octavo.compress.forms._hf import HFForm, JSONObject, decoder_json
from octavo.models._reading import ConfigReader
from octavo.models.stablelm import Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    keys = layer_norm_keys(cfg, reader)
    return {**keys, "use_parallel_residual": cfg.parallel}


def _json(cfg: Config, reader: ConfigReader) -> JSONObject:
    keys = {"use_parallel_residual": cfg.parallel, "qk_layernorm": cfg.attention.qk_norm}
    return {**decoder_json(cfg, reader, norm_eps="layer_norm_eps"), **keys}


GGUF = GGUFForm("stablelm", _keys)
HF = HFForm("stablelm", "StableLmForCausalLM", _json)
