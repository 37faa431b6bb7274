"""Hunyuan, dense: Llama with norms on the heads of q and k after rotation. Tencent, 2025."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.models._attention import AttentionConfig, same_windows, same_windows_from_gguf
from octavo.models._decoder import ConfigT, DecoderConfig, hf_rope
from octavo.models._reading import ConfigReader
from octavo.models._rope import RopeConfig, rope_section
from octavo.models._weights import WeightTable
from octavo.models.llama import build

__all__ = ["WEIGHTS", "Config", "build"]

ALIASES = ("hunyuan_v1_dense", "hunyuan-dense")
WEIGHTS = WeightTable(
    names={
        "layers.*.self_attn.query_layernorm": "layers.*.self_attn.q_norm",
        "layers.*.self_attn.key_layernorm": "layers.*.self_attn.k_norm",
    }
)
_MAX_ALPHA = 1e6


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Hunyuan's configuration, with norms on heads after rotation."""

    @classmethod
    def from_gguf(cls: type[ConfigT], reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> ConfigT:
        attention = AttentionConfig(same_windows_from_gguf(reader), qk_norm=True, norm_after_rope=True)
        return cls.read_gguf(reader, shapes, attention=attention)

    @classmethod
    def from_hf(cls: type[ConfigT], reader: ConfigReader) -> ConfigT:
        reader = reader.with_defaults({"rms_norm_eps": 1e-5})
        attention = AttentionConfig(same_windows(reader), qk_norm=True, norm_after_rope=True)
        return cls.read_hf(reader, attention=attention, rope=stretched_rope(reader))


def stretched_rope(reader: ConfigReader) -> RopeConfig:
    """Return the rotary embedding. If there is an `alpha`, it enlarges the base for sequences of any length."""
    plain = hf_rope(reader)
    theta = stretched_theta(reader, plain.rotary_dim)
    return plain if theta is None else hf_rope(reader, ConfigReader({"rope_theta": theta}))


def stretched_theta(reader: ConfigReader, rotary_dim: int) -> float | None:
    """Return the enlarged base, or None if there is no alpha. Published files with an alpha name the type "dynamic"."""
    section = rope_section(reader)
    kind = section.text("rope_type", section.text("type", "default"))
    if kind != "dynamic" or not section.has("alpha"):
        return None
    theta = section.number("rope_theta", reader.number("rope_theta", 10000.0, low=1.0), low=1.0)
    stretch: float = section.number("alpha", low=1e-3, high=_MAX_ALPHA) ** (rotary_dim / max(rotary_dim - 2, 1))
    return theta * stretch
