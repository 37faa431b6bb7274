"""Gemma 3, text: local and global layers, norms around attention and MLP, and on q and k. arXiv 2503.19786."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.graph.ops.attention import RopeParams
from octavo.models import gemma2
from octavo.models._attention import AttentionConfig, windows_from_gguf, windows_from_hf
from octavo.models._decoder import hf_rope
from octavo.models._mlp import MLPConfig
from octavo.models._reading import ConfigReader
from octavo.models._rope import rope_from_hf, scaled
from octavo.models._weights import Fold, WeightTable
from octavo.models.gemma2 import build

__all__ = [
    "ALIASES",
    "GLOBAL_THETA",
    "LOCAL_THETA",
    "PATTERN",
    "WEIGHTS",
    "Config",
    "build",
    "global_rope",
    "local_rope",
    "text_config",
]

ALIASES = ("gemma3_text",)
_HEAD_NORMS = ("layers.*.self_attn.q_norm", "layers.*.self_attn.k_norm")
WEIGHTS = WeightTable(
    names=gemma2.WEIGHTS.names,
    transforms=(*gemma2.WEIGHTS.transforms, *(Fold(stem, 1.0, "safetensors") for stem in _HEAD_NORMS)),
)

# Values that published files leave out.
_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
PATTERN = 6  # every sixth layer is global
LOCAL_THETA = 10_000.0
GLOBAL_THETA = 1_000_000.0


@dataclass(frozen=True, slots=True)
class Config(gemma2.Config):
    """Gemma 3's configuration, based on Gemma 2's. Global layers have no window."""

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        plain = cls.read_gguf(reader.with_defaults({"rope.freq_base": GLOBAL_THETA}), shapes)
        window = reader.integer("attention.sliding_window", 0, low=0) or None
        theta = reader.number("rope.freq_base_swa", LOCAL_THETA, low=1.0)
        # The file lacks the query scale, which differs from head_dim only in the 27B model (62 layers).
        query_dim = plain.hidden_size // plain.num_heads if plain.num_layers == 62 else plain.head_dim
        return replace(
            plain,
            attention=AttentionConfig(windows_from_gguf(reader, PATTERN, window), qk_norm=True, scale=query_dim**-0.5),
            rope=replace(plain.rope, local=scaled(plain.head_dim, theta)),
            logit_softcap=reader.optional_number("final_logit_softcapping"),
        )

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        reader = text_config(reader)
        if reader.flag("use_bidirectional_attention", False):
            raise reader.error("use_bidirectional_attention", True, "bidirectional attention is not supported")
        if cap := reader.optional_number("attn_logit_softcapping"):
            raise reader.error("attn_logit_softcapping", cap, "Gemma 3 has no softcap in its attention")
        scale = reader.number("query_pre_attn_scalar", 256.0) ** -0.5
        plain = cls.read_hf(
            reader,
            attention=AttentionConfig(windows_from_hf(reader, PATTERN), qk_norm=True, scale=scale),
            rope=hf_rope(reader, global_rope(reader), GLOBAL_THETA),
            mlp=MLPConfig.from_hf(reader, activation=("gelu_pytorch_tanh",)),
            logit_softcap=reader.optional_number("final_logit_softcapping"),
        )
        return replace(plain, rope=replace(plain.rope, local=local_rope(reader, plain.head_dim)))


def local_rope(reader: ConfigReader, head_dim: int) -> RopeParams:
    """Return the rotary embedding of layers with a window, from config.json."""
    section = reader.section("rope_parameters").section("sliding_attention")
    theta = reader.number("rope_local_base_freq", LOCAL_THETA, low=1.0)
    return rope_from_hf(section, head_dim, theta, reader.integer("max_position_embeddings"))


def text_config(reader: ConfigReader) -> ConfigReader:
    """Return the part of config.json about text, with defaults."""
    text = reader.section("text_config") if reader.has("text_config") else reader
    return text.with_defaults(_DEFAULTS)


def global_rope(reader: ConfigReader) -> ConfigReader:
    """Return the part of config.json about the rotary embedding of global layers.

    Newer files describe both kinds of layers in one place. Older files scale only the embedding of global layers.
    """
    ropes = reader.section("rope_parameters")
    return ropes.section("full_attention") if ropes.values else reader.section("rope_scaling")
