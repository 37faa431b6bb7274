"""EXAONE 3 and 3.5: Llama with different names in its files. LG AI Research, arXiv 2412.04862."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.models._attention import AttentionConfig, same_windows
from octavo.models._decoder import DecoderConfig, hf_rope
from octavo.models._mlp import MLPConfig
from octavo.models._reading import ConfigReader
from octavo.models._weights import WeightTable
from octavo.models.llama import build

__all__ = ["WEIGHTS", "Config", "build"]

_LAYER = "h.*."
WEIGHTS = WeightTable(
    prefixes=("transformer.", "model."),
    names={
        "wte": "embed_tokens",
        "ln_f": "norm",
        _LAYER + "ln_1": "layers.*.input_layernorm",
        _LAYER + "ln_2": "layers.*.post_attention_layernorm",
        **{f"{_LAYER}attn.attention.{part}_proj": f"layers.*.self_attn.{part}_proj" for part in "qkv"},
        _LAYER + "attn.attention.out_proj": "layers.*.self_attn.o_proj",
        _LAYER + "mlp.c_fc_0": "layers.*.mlp.gate_proj",
        _LAYER + "mlp.c_fc_1": "layers.*.mlp.up_proj",
        _LAYER + "mlp.c_proj": "layers.*.mlp.down_proj",
    },
)
_KEYS = {"num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps", "activation_function": "hidden_act"}


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """EXAONE 3's configuration, read from EXAONE's own keys."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        reader = reader.renamed(_KEYS).with_defaults({"rms_norm_eps": 1e-5, "num_key_value_heads": 8})
        return cls.read_hf(
            reader,
            attention=AttentionConfig(same_windows(reader)),
            rope=hf_rope(reader, theta=500_000.0),
            mlp=MLPConfig.from_hf(reader),
        )
