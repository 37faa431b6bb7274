"""The dense models of Granite 3 as a GGUF file and as a transformers checkpoint."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, decoder_keys
from octavo.compress.forms._hf import HFForm, JSONObject, decoder_json
from octavo.models._reading import ConfigReader
from octavo.models.granite import Config


def granite_keys(cfg: Config, reader: ConfigReader) -> Keys:
    """Return the keys that decoders share, and the keys of Granite's multipliers."""
    return {
        **decoder_keys(cfg, reader),
        "attention.scale": 1.0 if cfg.attention.scale is None else cfg.attention.scale,
        "embedding_scale": cfg.embedding_multiplier,
        "residual_scale": cfg.residual_multiplier,
        "logit_scale": cfg.logits_scaling,
    }


def _json(cfg: Config, reader: ConfigReader) -> JSONObject:
    return {
        **decoder_json(cfg, reader),
        "attention_multiplier": 1.0 if cfg.attention.scale is None else cfg.attention.scale,
        "embedding_multiplier": cfg.embedding_multiplier,
        "residual_multiplier": cfg.residual_multiplier,
        "logits_scaling": cfg.logits_scaling,
    }


GGUF = GGUFForm("granite", granite_keys)
HF = HFForm("granite", "GraniteForCausalLM", _json)
