"""The caches that operations declare: keys and values of tokens, or the state of a sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of every token, in the blocks of its sequence.

    layer: unique within a graph. window: a token sees itself and window - 1 tokens before it; None: all of them.
    """

    layer: int
    num_kv_heads: int
    key_dim: int  # columns of one head
    value_dim: int
    window: int | None = None

    @property
    def elements_per_token(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class StateCache:
    """Arrays of these shapes for each sequence, independent of its length. layer: unique within a graph."""

    layer: int
    shapes: tuple[tuple[int, ...], ...]

    @property
    def elements_per_sequence(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)
