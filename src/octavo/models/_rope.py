"""Rotary embeddings as config.json and GGUF metadata describe them."""

from __future__ import annotations

from dataclasses import replace

from octavo.graph import rope
from octavo.graph.ops import RopeParams
from octavo.models._reading import ConfigReader


def rope_from_hf(section: ConfigReader, head_dim: int, theta: float, max_positions: int) -> RopeParams:
    """section: `rope_parameters` or `rope_scaling`, which win over theta, the model's own base.

    max_positions: context length of the model. Raises ModelLoadError naming the key.
    """
    theta = section.number("rope_theta", theta, low=1.0)
    rotary_dim = int(head_dim * section.number("partial_rotary_factor", 1.0, high=1.0))
    if rotary_dim < 2 or rotary_dim % 2:
        raise section.error("partial_rotary_factor", rotary_dim / head_dim, "rotates no even number of columns")
    kind = section.text("rope_type", section.text("type", "default"))
    if kind in ("default", "dynamic", "mrope"):
        # Dynamic scaling starts beyond max_position_embeddings, where no request may go; the three
        # sections of mrope get equal positions for text.
        return rope.default(rotary_dim, theta)
    if kind == "linear":
        return rope.linear(rotary_dim, theta, section.number("factor"))
    original = section.integer("original_max_position_embeddings", max_positions, low=2)
    if kind == "llama3":
        low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
        if high <= low:
            raise section.error("high_freq_factor", high, f"must be more than low_freq_factor, {low}")
        return rope.llama3(rotary_dim, theta, section.number("factor"), low, high, original)
    if kind == "yarn":
        return rope.yarn(rotary_dim, theta, _yarn_from_hf(section, original, max_positions))
    if kind in ("longrope", "su"):
        factor = section.number("factor", max_positions / original)
        attention = section.optional_number("attention_factor")
        if attention is None:
            attention = rope.longrope_attention_factor(factor, original)
        divisors = section.numbers("long_factor" if max_positions > original else "short_factor", rotary_dim // 2)
        return rope.scaled(rotary_dim, theta, divisors, attention)
    raise section.error("rope_type", kind, "must be default, linear, dynamic, llama3, yarn or longrope")


def rope_from_gguf(reader: ConfigReader, head_dim: int, max_positions: int) -> RopeParams:
    """reader: metadata with the architecture's prefix. Raises ModelLoadError naming the key."""
    theta = reader.number("rope.freq_base", 10000.0, low=1.0)
    rotary_dim = reader.integer("rope.dimension_count", head_dim, low=2, high=head_dim)
    if rotary_dim % 2:
        raise reader.error("rope.dimension_count", rotary_dim, "must be even")
    original = reader.integer("rope.scaling.original_context_length", max_positions)
    tensors = ConfigReader(reader.values)
    if tensors.has("rope_factors_long.weight"):
        name = "rope_factors_long.weight" if max_positions > original else "rope_factors_short.weight"
        attention = reader.number("rope.scaling.attn_factor", 1.0)
        return rope.scaled(rotary_dim, theta, tensors.numbers(name, rotary_dim // 2), attention)
    if tensors.has("rope_freqs.weight"):
        return rope.scaled(rotary_dim, theta, tensors.numbers("rope_freqs.weight", rotary_dim // 2))
    legacy = reader.optional_number("rope.scale_linear")
    kind = reader.text("rope.scaling.type", "none" if legacy is None else "linear")
    if kind == "none":
        return rope.default(rotary_dim, theta)
    # Some converters write a factor of 0 for none.
    factor = reader.number("rope.scaling.factor", legacy if legacy is not None else 1.0, low=-1.0) or 1.0
    if kind == "linear":
        return rope.linear(rotary_dim, theta, factor)
    if kind == "yarn":
        # The file's attn_factor multiplies what YaRN itself prescribes.
        params = rope.YarnParams(
            factor,
            original,
            reader.number("rope.scaling.yarn_beta_fast", 32.0),
            reader.number("rope.scaling.yarn_beta_slow", 1.0),
        )
        scaled = rope.yarn(rotary_dim, theta, params)
        attention = scaled.attention_factor * reader.number("rope.scaling.attn_factor", 1.0)
        return replace(scaled, attention_factor=attention)
    raise reader.error("rope.scaling.type", kind, "must be none, linear or yarn")


def _yarn_from_hf(section: ConfigReader, original: int, max_positions: int) -> rope.YarnParams:
    return rope.YarnParams(
        section.number("factor", max_positions / original),
        original,
        section.number("beta_fast", 32.0),
        section.number("beta_slow", 1.0),
        section.optional_number("attention_factor"),
        section.number("mscale", 0.0, low=-1.0),
        section.number("mscale_all_dim", 0.0, low=-1.0),
        section.flag("truncate", True),
    )
