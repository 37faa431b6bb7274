"""Nomic BERT: BERT with rotary positions and SwiGLU. Nussbaum et al., arXiv 2402.01613."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.models._encoder import EncoderConfig, build, head_dim_of, split_encoder
from octavo.models._reading import MAX_LAYERS, ConfigReader
from octavo.models._rope import rope_from_gguf, rope_from_hf, rope_section
from octavo.models._weights import WeightTable
from octavo.models.bert import BERT_NAMES

__all__ = ["ALIASES", "WEIGHTS", "Config", "build"]

ALIASES = ("nomic-bert",)
WEIGHTS = WeightTable(
    prefixes=("nomic_bert.", "bert.", "model."),
    names={
        **BERT_NAMES,
        "emb_ln": "embed_norm",
        "encoder.layers.*.norm1": "layers.*.post_attention_layernorm",
        "encoder.layers.*.norm2": "layers.*.post_feedforward_layernorm",
        "encoder.layers.*.attn.Wqkv": "layers.*.self_attn.qkv_proj",
        "encoder.layers.*.attn.out_proj": "layers.*.self_attn.o_proj",
        "encoder.layers.*.mlp.fc11": "layers.*.mlp.up_proj",
        "encoder.layers.*.mlp.fc12": "layers.*.mlp.gate_proj",
        "encoder.layers.*.mlp.fc2": "layers.*.mlp.down_proj",
    },
    transforms=split_encoder(),
)


# The keys of the configuration from before transformers had the model, for which code came with the checkpoint.
_OLDER = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}
# What the models have in common, of the switches that the older configuration knows.
_FIXED = {"activation_function": "swiglu", "prenorm": False, "qkv_proj_bias": False, "rotary_emb_fraction": 1.0,
          "parallel_block": False, "use_rms_norm": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False,
          "rotary_emb_interleaved": False, "num_experts": 0}  # fmt: skip


class Config(EncoderConfig):
    """Nomic BERT's configuration, read from transformers' keys or from older ones."""

    __slots__ = ()

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        head_dim = head_dim_of(reader, "attention.head_count", "embedding_length")
        rope = rope_from_gguf(reader, head_dim, reader.integer("context_length"))
        ropes = (rope,) * reader.integer("block_count", high=MAX_LAYERS)
        return cls.read_gguf(reader, shapes, is_gated=True, activation="silu", ropes=ropes)

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        for key, value in _FIXED.items():
            if reader.has(key) and reader.value(key) != value:
                raise reader.error(key, reader.value(key), f"must be {value!r}")
        reader = reader.renamed(_OLDER)
        if (kind := reader.text("hidden_act", "silu")) != "silu":
            raise reader.error("hidden_act", kind, "must be silu")
        head_dim = head_dim_of(reader, "num_attention_heads", "hidden_size")
        if (given := reader.integer("head_dim", head_dim)) != head_dim:
            raise reader.error("head_dim", given, f"must be the width over the heads, {head_dim}")
        theta = reader.number("rope_theta", 1000.0, low=1.0)
        rope = rope_from_hf(rope_section(reader), head_dim, theta, reader.integer("max_position_embeddings"))
        ropes = (rope,) * reader.integer("num_hidden_layers", high=MAX_LAYERS)
        return cls.read_hf(reader, norm_eps=1e-12, is_gated=True, activation="silu", ropes=ropes)
