"""Qwen 3 VL, dense, text: Qwen 3 with sectioned rotary positions, all equal for text. arXiv 2511.21631."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.models import qwen3
from octavo.models._reading import ConfigReader
from octavo.models._wrapped import text_section
from octavo.models.llama import build

__all__ = ["Config", "build"]

ALIASES = ("qwen3_vl", "qwen3_vl_text")


@dataclass(frozen=True, slots=True)
class Config(qwen3.Config):
    """Configuration of Qwen 3 VL's text model, the same as Qwen 3's."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        tied = reader.flag("tie_word_embeddings", False)
        text = text_section(reader).with_defaults({"rope_theta": 5e5, "tie_word_embeddings": tied})
        return super(Config, cls).from_hf(text)
