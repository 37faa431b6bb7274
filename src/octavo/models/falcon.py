"""Falcon 1 and 2: few kv heads, attention parallel to the MLP; the RW models use ALiBi. arXiv 2311.16867.

ALiBi is computed exactly here; transformers rounds the products of slopes and positions to bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping

from octavo.models._classic import ClassicConfig, alibi_slopes, build, gguf_rope, hf_key, hf_rope, split_qkv
from octavo.models._reading import MAX_WIDTH, ConfigReader
from octavo.models._weights import WeightTable

__all__ = ["WEIGHTS", "Config", "build"]

WEIGHTS = WeightTable(
    prefixes=("transformer.",),
    names={
        "word_embeddings": "embed_tokens",
        "h.*.input_layernorm": "layers.*.input_layernorm",
        "h.*.post_attention_layernorm": "layers.*.post_attention_layernorm",
        "h.*.ln_attn": "layers.*.attention_layernorm",
        "h.*.ln_mlp": "layers.*.input_layernorm",
        "blk.*.attn_norm_2": "layers.*.attention_layernorm",
        "h.*.self_attention.query_key_value": "layers.*.self_attn.qkv_proj",
        "h.*.self_attention.dense": "layers.*.self_attn.o_proj",
        "h.*.mlp.dense_h_to_4h": "layers.*.mlp.up_proj",
        "h.*.mlp.dense_4h_to_h": "layers.*.mlp.down_proj",
        "ln_f": "norm",
    },
    transforms=split_qkv(fused="by_head"),
)
_TWO_NORMS = "attention_layernorm"  # the norm before attention; input_layernorm is then the MLP's


class Config(ClassicConfig):
    """Falcon's configuration.

    GGUF files have no key for the second norm, only its weights if there are any. Their activation is always GELU.
    """

    __slots__ = ()

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        two_norms = f"layers.0.{_TWO_NORMS}.weight" in shapes
        return cls.read_gguf(
            reader,
            shapes,
            activation="gelu",
            rope=gguf_rope(reader),
            block="parallel",
            mlp_norm="input_layernorm",
            attention_norm=_TWO_NORMS if two_norms else "input_layernorm",
        )

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        reader = reader.with_defaults({"activation": "gelu", "max_position_embeddings": 2048})
        grouped = reader.flag("new_decoder_architecture", False)  # as in Falcon 40B
        parallel = grouped or reader.flag("parallel_attn", True)
        two_norms = grouped and reader.integer("num_ln_in_parallel_attn", 2, high=2) == 2
        num_heads = reader.integer(hf_key(reader, "heads"), high=MAX_WIDTH)
        kv_heads = "num_kv_heads" if reader.has("num_kv_heads") else "n_head_kv"
        if not grouped:
            count = 1 if reader.flag("multi_query", True) else num_heads
            reader, kv_heads = reader.replaced("num_kv_heads", count), "num_kv_heads"
        alibi = reader.flag("alibi", False)
        head_dim = reader.integer(hf_key(reader, "width"), high=MAX_WIDTH) // num_heads
        return cls.read_hf(
            reader,
            tied=True,
            kv_heads=kv_heads,
            block="parallel" if parallel else "pre_norm",
            mlp_norm="input_layernorm" if parallel else "post_attention_layernorm",
            attention_norm=_TWO_NORMS if two_norms else "input_layernorm",
            rope=None if alibi else hf_rope(reader),
            # The slope is added before the scores are scaled.
            alibi_slopes=tuple(slope * head_dim**-0.5 for slope in alibi_slopes(num_heads)) if alibi else None,
        )
