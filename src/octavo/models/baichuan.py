"""Baichuan 1 and 2: Llama with q, k and v in one matrix; the 13B models use ALiBi. arXiv 2309.10305."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.graph.ops.attention import AttentionParams
from octavo.models._attention import AttentionConfig, same_windows
from octavo.models._classic import alibi_slopes
from octavo.models._decoder import DecoderConfig
from octavo.models._reading import ConfigReader
from octavo.models._weights import UnitRows, WeightTable, fused_qkv, rotary_pairs
from octavo.models.llama import build

__all__ = ["WEIGHTS", "Config", "build"]

_VOCAB_2 = 125_696  # vocabulary of Baichuan 2, whose output head has rows of length 1
_LAYERS_13B = 40  # files have no other sign that a model uses ALiBi
WEIGHTS = WeightTable(
    names={"layers.*.self_attn.W_pack": "layers.*.self_attn.qkv_proj"},
    transforms=(
        fused_qkv("safetensors"),
        *rotary_pairs("gguf"),
        UnitRows("lm_head", lambda c: c.vocab_size == _VOCAB_2, "safetensors"),
    ),
)


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Baichuan's configuration. Models with 40 layers use ALiBi instead of the rotary embedding."""

    def attention_params(self, layer: int) -> AttentionParams:
        params = DecoderConfig.attention_params(self, layer)
        return params if self.rotates else replace(params, alibi_slopes=alibi_slopes(self.num_heads))

    @property
    def rotates(self) -> bool:
        """True for the 7B models."""
        return self.num_layers != _LAYERS_13B

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        return cls.read_gguf(reader, shapes)._of_its_size()

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        if reader.has("model_max_length"):
            reader = reader.with_defaults({"max_position_embeddings": reader.integer("model_max_length")})
        return cls.read_hf(reader, attention=AttentionConfig(same_windows(reader)))._of_its_size()

    def _of_its_size(self) -> Config:
        return self if self.rotates else replace(self, rope=replace(self.rope, rotates=(False,) * self.num_layers))
