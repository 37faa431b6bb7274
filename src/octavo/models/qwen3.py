"""Qwen 3, dense: norms on the heads of q and k, and an independent head_dim. Yang et al., arXiv 2505.09388."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.models._attention import AttentionConfig, same_windows_from_gguf, upper_windows
from octavo.models._decoder import ConfigT, DecoderConfig
from octavo.models._reading import ConfigReader
from octavo.models.llama import build

__all__ = ["Config", "build"]


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Qwen 3's configuration. Upper layers may have a sliding window."""

    @classmethod
    def from_gguf(cls: type[ConfigT], reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> ConfigT:
        return cls.read_gguf(reader, shapes, attention=AttentionConfig(same_windows_from_gguf(reader), qk_norm=True))

    @classmethod
    def from_hf(cls: type[ConfigT], reader: ConfigReader) -> ConfigT:
        reader = reader.with_defaults({"head_dim": 128})
        return cls.read_hf(reader, attention=AttentionConfig(upper_windows(reader), qk_norm=True))
