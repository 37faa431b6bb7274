"""Rotary frequencies of every scaling in use, reduced to `RopeParams`.

All functions return radians per position for each pair; rotary_dim is the number of columns of a head that rotate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.batch import Float64
from octavo.graph.ops import RopeParams


def base_frequencies(rotary_dim: int, theta: float) -> Float64:
    """theta^(-2 i / rotary_dim), [rotary_dim / 2]. Su et al., arXiv 2104.09864."""
    return 1.0 / theta ** (np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)


def default(rotary_dim: int, theta: float) -> RopeParams:
    """No scaling."""
    return RopeParams(_floats(base_frequencies(rotary_dim, theta)))


def linear(rotary_dim: int, theta: float, factor: float) -> RopeParams:
    """Positions are divided by `factor` (Chen et al., arXiv 2306.15595)."""
    return RopeParams(_floats(base_frequencies(rotary_dim, theta) / factor))


def scaled(rotary_dim: int, theta: float, divisors: Sequence[float], attention_factor: float = 1.0) -> RopeParams:
    """Every frequency has a divisor of its own: `rope_freqs.weight` of GGUF files, and long-rope's lists."""
    return RopeParams(_floats(base_frequencies(rotary_dim, theta) / np.asarray(divisors)), attention_factor)


def llama3(
    rotary_dim: int, theta: float, factor: float, low_freq_factor: float, high_freq_factor: float, original: int
) -> RopeParams:
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, those between interpolated.

    original: the context length of the training, in tokens. Meta's `apply_scaling` in the Llama 3.1 release.
    """
    plain = base_frequencies(rotary_dim, theta)
    turns = original * plain / (2 * math.pi)  # over the original context
    smooth = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0, 1.0)
    return RopeParams(_floats((1 - smooth) * plain / factor + smooth * plain))


@dataclass(frozen=True, slots=True)
class YarnParams:
    """Peng et al., arXiv 2309.00071. original: context length of the training, in tokens."""

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None: from mscale if given, else 0.1 ln(factor) + 1
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


def yarn(rotary_dim: int, theta: float, params: YarnParams) -> RopeParams:
    """Frequencies with fewer than beta_slow turns over the original context are divided by `factor`, those with more
    than beta_fast turns are kept, and those in between are interpolated over their index."""
    p = params

    def index_of(turns: float) -> float:
        return rotary_dim * math.log(p.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index_of(p.beta_fast), index_of(p.beta_slow)
    if p.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp = np.clip((np.arange(rotary_dim // 2) - low) / (high - low if high != low else 0.001), 0.0, 1.0)
    plain = base_frequencies(rotary_dim, theta)
    attention_factor = p.attention_factor
    if attention_factor is None:
        attention_factor = _mscale(p.factor, 1.0)
        if p.mscale and p.mscale_all_dim:
            attention_factor = _mscale(p.factor, p.mscale) / _mscale(p.factor, p.mscale_all_dim)
    return RopeParams(_floats(plain / p.factor * ramp + plain * (1 - ramp)), attention_factor)


def longrope_attention_factor(factor: float, original: int) -> float:
    """sqrt(1 + ln(factor) / ln(original)). Ding et al., arXiv 2402.13753; factor: new context / original."""
    return 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _floats(frequencies: Float64) -> tuple[float, ...]:
    return tuple(float(f) for f in frequencies)
