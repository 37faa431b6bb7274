"""DistilBERT: half of BERT's layers, no token types. Sanh et al., arXiv 1910.01108."""

from __future__ import annotations

from octavo.models import bert
from octavo.models._encoder import build
from octavo.models._reading import ConfigReader
from octavo.models._weights import WeightTable

__all__ = ["WEIGHTS", "Config", "build"]

_ATTENTION = "transformer.layer.*.attention."
WEIGHTS = WeightTable(
    prefixes=("distilbert.", "model."),
    names={
        **bert.BERT_NAMES,
        **{f"{_ATTENTION}{part}_lin": f"layers.*.self_attn.{part}_proj" for part in "qkv"},
        _ATTENTION + "out_lin": "layers.*.self_attn.o_proj",
        "transformer.layer.*.sa_layer_norm": "layers.*.post_attention_layernorm",
        "transformer.layer.*.ffn.lin1": "layers.*.mlp.up_proj",
        "transformer.layer.*.ffn.lin2": "layers.*.mlp.down_proj",
        "transformer.layer.*.output_layer_norm": "layers.*.post_feedforward_layernorm",
        "pre_classifier": "pooler",
        "vocab_transform": "mlm",
        "vocab_layer_norm": "mlm_norm",
        "vocab_projector": "mlm_decoder",
    },
)
_NAMES = {
    "dim": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "hidden_dim": "intermediate_size",
    "activation": "hidden_act",
}


class Config(bert.Config):
    """DistilBERT's configuration. A classification head has a relu between its two linears."""

    __slots__ = ()

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        return cls.read_hf(reader.renamed(_NAMES), norm_eps=1e-12, position_offset=0, head_activation="relu")
