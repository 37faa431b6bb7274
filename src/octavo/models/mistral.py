"""Mistral, Ministral and Ministral 3: Llama with sliding windows and scaled queries. Jiang et al., arXiv 2310.06825."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.errors import ModelLoadError
from octavo.models._decoder import DecoderConfig, rope_section, windows_of_types
from octavo.models._reading import MAX_LAYERS, ConfigReader
from octavo.models.llama import WEIGHTS, build

__all__ = ["WEIGHTS", "Config", "build"]

ALIASES = ("ministral", "ministral3", "mistral3")


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Ministral 3 also scales queries, from position `original_length` on, which is not supported."""

    scales_queries: bool = False

    def for_length(self, max_model_len: int) -> Config:
        if self.scales_queries and max_model_len > self.original_length:
            raise ModelLoadError(
                f"max_model_len {max_model_len}: from position {self.original_length} on this model scales its "
                f"queries, which is not supported; use a max_model_len of at most {self.original_length}"
            )
        return self

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        plain = cls.read_gguf(reader, shapes)
        if reader.number("rope.scaling.yarn_log_multiplier", 0.0, low=-1.0):
            # mscale and mscale_all_dim are equal and cancel out.
            plain = replace(plain, rope=replace(plain.rope, attention_factor=1.0))
        if not reader.number("attention.temperature_scale", 0.0, low=-1.0):
            return plain
        original = reader.integer("rope.scaling.original_context_length")
        return replace(plain, scales_queries=True, original_length=original)

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        reader = reader.section("text_config") if reader.has("text_config") else reader
        num_layers = reader.integer("num_hidden_layers", high=MAX_LAYERS)
        # The first Mistral had a window and left the key out; null means none.
        default = None if reader.text("model_type", "mistral") == "ministral3" else 4096
        window = reader.values.get("sliding_window", default)
        window = None if window is None else reader.integer("sliding_window", default)
        windows = windows_of_types(reader, num_layers, window) if reader.has("layer_types") else (window,) * num_layers
        plain = cls.read_hf(reader, windows=windows)
        rope = rope_section(reader)
        if not rope.number("llama_4_scaling_beta", 0.0, low=-1.0):
            return plain
        original = rope.integer("original_max_position_embeddings")
        return replace(plain, scales_queries=True, original_length=original)
