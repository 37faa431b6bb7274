"""Rotary embeddings with every scaling in use, as config.json and GGUF metadata describe them, reduced to `RopeParams`.

rotary_dim: number of columns of a head that rotate.
theta: base of the frequencies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from octavo.batch import Float64
from octavo.graph.ops.attention import RopeParams
from octavo.models._reading import ConfigReader

_LONG_ROPE = ("longrope", "su")

# More than the first, at most the second. Published values keep a wide distance from both ends. Within them every
# frequency is a finite positive number and every attention factor too.
_FACTORS = (1e-3, 1e6)  # bounds on factors of positions, frequencies and rotations
_ATTENTION = (1e-3, 1e3)
_DIVISORS = (1e-3, 1e32)  # bounds on divisors of single frequencies
STILL = 1e30
"""The divisor of a frequency that does not rotate."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The rotary embedding of a decoder's layers. A model family overrides the defaults that differ."""

    params: RopeParams
    local: RopeParams | None = None  # for layers with a window; None means `params`
    rotates: tuple[bool, ...] | None = None  # [num_layers]; None means all layers do
    short: RopeParams | None = None  # long-rope: replaces `params` in sequences of up to original_length tokens
    original_length: int = 0

    @property
    def rotary_dim(self) -> int:
        """Number of columns of a head that rotate."""
        return 2 * len(self.params.frequencies)

    def of_layer(self, layer: int, *, local: bool) -> RopeParams | None:
        """Return the rotary embedding of one layer, or None if the layer has no rotary positions.

        local: the layer has a window.
        """
        if self.rotates is not None and not self.rotates[layer]:
            return None
        return self.local if local and self.local is not None else self.params

    def for_length(self, max_model_len: int) -> RopeConfig:
        """Return the rotary embedding for sequences of at most `max_model_len` tokens."""
        if self.short is None or max_model_len > self.original_length:
            return self
        return replace(self, params=self.short)


def _number(section: ConfigReader, key: str, default: float | None = None) -> float:
    """Read a plausible number of positions, frequencies or rotations. Raises ModelLoadError naming the key."""
    return section.number(key, default, low=_FACTORS[0], high=_FACTORS[1])


def _number_unless_zero(section: ConfigReader, key: str, default: float) -> float:
    """Read a number like `_number`, but treat 0 as missing."""
    return 0.0 if section.number(key, default, low=-math.inf) == 0.0 else _number(section, key, default)


def base_frequencies(rotary_dim: int, theta: float) -> Float64:
    """Return theta^(-2 i / rotary_dim), [rotary_dim / 2]. Su et al., arXiv 2104.09864."""
    return 1.0 / theta ** (np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)


def scaled(rotary_dim: int, theta: float, divisors: ArrayLike = 1.0, attention_factor: float = 1.0) -> RopeParams:
    """Divide the frequencies by one number, or each by its own divisor.

    One number stretches positions (Chen et al., arXiv 2306.15595). Separate divisors are in `rope_freqs.weight` of GGUF
    files and in long-rope's lists.
    """
    frequencies = base_frequencies(rotary_dim, theta) / np.asarray(divisors)
    return RopeParams(tuple(frequencies.tolist()), attention_factor)


def llama3(rotary_dim: int, theta: float, section: ConfigReader, original: int) -> RopeParams:
    """Scale frequencies as in Llama 3.1: divide long wavelengths by `factor`, keep short ones, and interpolate in
    between.

    original: context length in training, in tokens.

    Source: Meta's `apply_scaling` in the Llama 3.1 release.
    """
    low, high = _number(section, "low_freq_factor"), _number(section, "high_freq_factor")
    if high < low:
        raise section.error("high_freq_factor", high, f"must be at least low_freq_factor, {low}")
    plain = base_frequencies(rotary_dim, theta)
    turns = original * plain / (2 * math.pi)  # over the original context
    # With equal factors, as in Llama 4 Scout, there is nothing to interpolate.
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0) if high > low else (turns >= low).astype(np.float64)
    frequencies = (1 - smooth) * plain / _number(section, "factor") + smooth * plain
    return RopeParams(tuple(frequencies.tolist()))


def yarn(
    rotary_dim: int,
    theta: float,
    factor: float,
    original: int,
    *,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> RopeParams:
    """Scale frequencies with YaRN. Peng et al., arXiv 2309.00071.

    Frequencies with fewer than beta_slow rotations over the original context are divided by `factor`, those with more
    than beta_fast rotations are kept, and those in between are interpolated by index.

    original: context length in training, in tokens.
    """

    def index_of(turns: float) -> float:
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index_of(beta_fast), index_of(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp = np.clip((np.arange(rotary_dim // 2) - low) / (high - low if high != low else 0.001), 0.0, 1.0)
    plain = base_frequencies(rotary_dim, theta)
    frequencies = plain / factor * ramp + plain * (1 - ramp)
    return RopeParams(tuple(frequencies.tolist()), yarn_mscale(factor, 1.0))


def proportional(head_dim: int, theta: float, share: float, factor: float) -> RopeParams:
    """Compute Gemma 4's frequencies for a whole head; only the first `share` of them rotate."""
    frequencies = base_frequencies(head_dim, theta) / factor
    frequencies[int(share * head_dim // 2) :] = 0.0
    return RopeParams(tuple(frequencies.tolist()))


def long_rope_from_hf(section: ConfigReader, max_positions: int) -> int | None:
    """Return the length in tokens up to which long-rope uses its short factors.

    Returns None for another kind of scaling, or if there are no long factors.
    """
    if section.text("rope_type", section.text("type", "default")) not in _LONG_ROPE:
        return None
    original = section.integer("original_max_position_embeddings", max_positions, low=2)
    return original if original < max_positions else None


def long_rope_from_gguf(reader: ConfigReader, max_positions: int) -> int | None:
    """Return the length in tokens up to which long-rope uses its short factors, for a GGUF file."""
    if not ConfigReader(reader.values).has("rope_factors_long.weight"):
        return None
    original = reader.integer("rope.scaling.original_context_length", max_positions)
    return original if original < max_positions else None


def rope_section(reader: ConfigReader) -> ConfigReader:
    """Return the section of config.json about the rotary embedding, in its newer or older form."""
    section = reader.section("rope_parameters" if reader.has("rope_parameters") else "rope_scaling")
    # Older files have these two keys outside the section.
    beside = ("partial_rotary_factor", "original_max_position_embeddings")
    return section.with_defaults({key: reader.values[reader.prefix + key] for key in beside if reader.has(key)})


def rope_from_hf(
    section: ConfigReader, head_dim: int, theta: float, max_positions: int, length: int | None = None
) -> RopeParams:
    """Read the rotary embedding from a section of config.json. Raises ModelLoadError naming the key.

    section: `rope_parameters` or `rope_scaling`; values in it override theta, the model's own base.
    max_positions: context length of the model.
    length: length of the longest sequence; None means max_positions.
    """
    theta = section.number("rope_theta", theta, low=1.0)
    share = section.number("partial_rotary_factor", 1.0, high=1.0)
    if section.text("rope_type", "default") == "proportional":
        return proportional(head_dim, theta, share, _number(section, "factor", 1.0))
    rotary_dim = int(head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2:
        raise section.error("partial_rotary_factor", rotary_dim / head_dim, "must rotate an even number of columns")
    kind = section.text("rope_type", section.text("type", "default"))
    if kind in ("default", "dynamic", "mrope"):
        # Dynamic scaling starts beyond max_position_embeddings, which no request may exceed; the three
        # sections of mrope get equal positions for text.
        return scaled(rotary_dim, theta)
    if kind == "linear":
        return scaled(rotary_dim, theta, _number(section, "factor"))
    original = section.integer("original_max_position_embeddings", max_positions, low=2)
    if kind == "llama3":
        return llama3(rotary_dim, theta, section, original)
    if kind == "yarn":
        return _yarn_from_hf(section, rotary_dim, theta, original, _number(section, "factor", max_positions / original))
    if kind in _LONG_ROPE:
        factor = _number(section, "factor", max_positions / original)
        attention = _attention_factor(section)
        if attention is None:  # Ding et al., arXiv 2402.13753
            attention = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
        name = "long_factor" if (length or max_positions) > original else "short_factor"
        divisors = _divisors(section, name, rotary_dim)
        return scaled(rotary_dim, theta, divisors, attention)
    raise section.error("rope_type", kind, "must be default, linear, dynamic, llama3, yarn, longrope or proportional")


def rope_from_gguf(
    reader: ConfigReader, head_dim: int, max_positions: int, length: int | None = None, *, truncate: bool = True
) -> RopeParams:
    """Read the rotary embedding of a GGUF file. Other arguments are as in `rope_from_hf`.

    reader: metadata with the architecture's prefix.
    truncate: as in `yarn`.
    """
    theta = reader.number("rope.freq_base", 10000.0, low=1.0)
    rotary_dim = reader.integer("rope.dimension_count", head_dim, low=2, high=head_dim)
    if rotary_dim % 2:
        raise reader.error("rope.dimension_count", rotary_dim, "must be even")
    original = reader.integer("rope.scaling.original_context_length", max_positions)
    tensors = ConfigReader(reader.values)
    if tensors.has("rope_factors_long.weight"):
        name = "rope_factors_long.weight" if (length or max_positions) > original else "rope_factors_short.weight"
        attention = _gguf_attention_factor(reader)
        return scaled(rotary_dim, theta, _divisors(tensors, name, rotary_dim), attention)
    if tensors.has("rope_freqs.weight"):
        return scaled(rotary_dim, theta, _divisors(tensors, "rope_freqs.weight", rotary_dim))
    legacy = _number(reader, "rope.scale_linear") if reader.has("rope.scale_linear") else None
    kind = reader.text("rope.scaling.type", "none" if legacy is None else "linear")
    if kind == "none":
        return scaled(rotary_dim, theta)
    # Some converters write 0 if there is no factor.
    factor = _number_unless_zero(reader, "rope.scaling.factor", 1.0 if legacy is None else legacy) or 1.0
    if kind == "linear":
        return scaled(rotary_dim, theta, factor)
    if kind == "yarn":
        fast, slow = _turns(reader, "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow")
        params = yarn(rotary_dim, theta, factor, original, beta_fast=fast, beta_slow=slow, truncate=truncate)
        # The file's attn_factor multiplies what YaRN itself prescribes.
        attention = params.attention_factor * _gguf_attention_factor(reader)
        return replace(params, attention_factor=attention)
    raise reader.error("rope.scaling.type", kind, "must be none, linear or yarn")


def _yarn_from_hf(section: ConfigReader, rotary_dim: int, theta: float, original: int, factor: float) -> RopeParams:
    fast, slow = _turns(section, "beta_fast", "beta_slow")
    truncate = section.flag("truncate", True)
    params = yarn(rotary_dim, theta, factor, original, beta_fast=fast, beta_slow=slow, truncate=truncate)
    attention = _attention_factor(section)
    mscale, mscale_all_dim = (_number_unless_zero(section, key, 0.0) for key in ("mscale", "mscale_all_dim"))
    if attention is None and mscale and mscale_all_dim:
        attention = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return params if attention is None else replace(params, attention_factor=attention)


def rotating_layers(num_layers: int, interval: int) -> tuple[bool, ...]:
    """Return whether each layer rotates its queries and keys, [num_layers]: all do except every `interval`-th one."""
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return YaRN's attention factor for positions stretched by `factor`.

    DeepSeek weights its logarithm by `mscale`.
    """
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _turns(section: ConfigReader, fast_key: str, slow_key: str) -> tuple[float, float]:
    """Return YaRN's two numbers of rotations: keep frequencies above the first, divide frequencies below the second."""
    fast, slow = _number(section, fast_key, 32.0), _number(section, slow_key, 1.0)
    if fast < slow:
        raise section.error(fast_key, fast, f"must be at least {slow_key}, {slow}")
    return fast, slow


def _attention_factor(section: ConfigReader) -> float | None:
    if not section.has("attention_factor"):
        return None
    return section.number("attention_factor", low=_ATTENTION[0], high=_ATTENTION[1])


def _gguf_attention_factor(reader: ConfigReader) -> float:
    return reader.number("rope.scaling.attn_factor", 1.0, low=_ATTENTION[0], high=_ATTENTION[1])


def _divisors(section: ConfigReader, key: str, rotary_dim: int) -> tuple[float, ...]:
    """Read one divisor for each frequency."""
    return section.numbers(key, rotary_dim // 2, low=_DIVISORS[0], high=_DIVISORS[1])
