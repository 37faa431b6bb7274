"""Qwen 2 VL and 2.5 VL, text: Qwen 2 with sectioned rotary positions, all equal for text. arXiv 2409.12191."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.models._decoder import DecoderConfig
from octavo.models._reading import ConfigReader
from octavo.models._wrapped import text_section
from octavo.models.llama import build

__all__ = ["Config", "build"]

ALIASES = ("qwen2_vl", "qwen2_5_vl", "qwen2_vl_text", "qwen2_5_vl_text")


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Configuration of Qwen 2 VL's text model.

    The published files have no section about text: its keys are at the top level.
    """

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        tied = reader.flag("tie_word_embeddings", False)
        return cls.read_hf(text_section(reader).with_defaults({"rope_theta": 1e6, "tie_word_embeddings": tied}))
