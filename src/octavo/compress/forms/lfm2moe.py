"""LFM2 with experts as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys
from octavo.compress.forms.lfm2 import lfm2_keys
from octavo.models._reading import ConfigReader
from octavo.models.lfm2moe import Config


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    routing = cfg.mlp.experts
    assert routing is not None
    return {
        **lfm2_keys(cfg, reader),
        "leading_dense_block_count": cfg.mlp.first_experts or 0,
        "expert_gating_func": 2,
        "expert_weights_norm": routing.normalize,
        "expert_weights_scale": routing.scale,
    }


GGUF = GGUFForm("lfm2moe", _keys)
