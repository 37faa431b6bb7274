"""The caches that operations declare: keys and values of tokens, or the state of a sequence."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.graph.values import TOKENS, RowDomain

STATES_PER_SEQUENCE = 2  # slots for states, for each of the sequences that may run at once


def first_visible(position: int, window: int | None, *, chunked: bool = False) -> int:
    """Return the first position that a token at `position` sees.

    window: the token sees itself and the window - 1 tokens before it; None means all of them.
    chunked: positions are divided into chunks of `window` tokens, and the token sees its own chunk up to itself.
    """
    if window is None:
        return 0
    return position // window * window if chunked else max(position - window + 1, 0)


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of every token, or of every row of another domain, in the blocks of its sequence.

    layer: unique within a graph.
    window, chunked: see `first_visible`.
    domain: domain of the rows that are cached.
    """

    layer: int
    num_kv_heads: int
    key_dim: int  # columns of one head
    value_dim: int  # 0 if values are columns of the keys
    window: int | None = None
    chunked: bool = False
    domain: RowDomain = TOKENS

    @property
    def elements_per_token(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class StateCache:
    """Float32 arrays of these shapes for each sequence, whatever its length.

    index: unique among a graph's states.

    A new sequence starts from zeros.
    """

    index: int
    shapes: tuple[tuple[int, ...], ...]

    @property
    def elements_per_sequence(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers whose tokens share blocks: a sequence has one block table per group.

    domain: domain of the rows that are cached instead of tokens.

    Blocks of all groups come from one pool and are equally large, with room for `CacheLayout.slots` layers.
    """

    window: int | None  # the window of all its layers
    layers: tuple[int, ...]
    chunked: bool = False  # and this, too
    # Not in the text from which names of blocks are made: operations name their domains there.
    domain: RowDomain = field(default=TOKENS, repr=False)

    def max_blocks(self, num_tokens: int, block_size: int, max_step_tokens: int) -> int:
        """Return the most blocks that a sequence of `num_tokens` tokens holds at once.

        A step computes up to `max_step_tokens` tokens.

        Blocks that have left the window are freed after each step.
        """
        blocks = -(-num_tokens // block_size)
        if self.window is None:
            return blocks
        # What the first token of a step sees before it, and the step itself, from anywhere in a block on. The last
        # token of a chunk sees as many tokens as one with a window.
        return min(blocks, -(-(self.window + max_step_tokens - 2) // block_size) + 1)

    def first_block(self, num_tokens: int, block_size: int) -> int:
        """Return the first block that the token after `num_tokens` tokens still sees."""
        return first_visible(num_tokens, self.window, chunked=self.chunked) // block_size


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The groups of a graph's layers, at least one.

    If all layers have the same window and domain, there is exactly one.
    """

    groups: tuple[CacheGroup, ...]

    @property
    def slots(self) -> int:
        """The number of layers in the largest group. The layers of a group use slots 0, 1, ... of a block."""
        return max((len(group.layers) for group in self.groups), default=0)

    def place(self, layer: int) -> tuple[int, int]:
        """Return (slot, group) of a layer."""
        group = next(index for index, group in enumerate(self.groups) if layer in group.layers)
        return self.groups[group].layers.index(layer), group

    def max_blocks(self, num_tokens: int, block_size: int, max_step_tokens: int) -> int:
        """Return the most blocks that a sequence of `num_tokens` tokens holds at once, over all groups."""
        return sum(group.max_blocks(num_tokens, block_size, max_step_tokens) for group in self.groups)

    def max_tokens(self, num_blocks: int, block_size: int, max_step_tokens: int, limit: int) -> int:
        """Return the length of the longest sequence that fits in `num_blocks` blocks.

        It is a whole number of blocks, and at most `limit` tokens rounded up to whole blocks.
        """
        lengths = range(0, limit + block_size, block_size)
        fitting = bisect_right(lengths, num_blocks, key=lambda n: self.max_blocks(n, block_size, max_step_tokens))
        return lengths[fitting - 1]


def cache_layout(caches: Sequence[KVCache]) -> CacheLayout:
    """Group layers by window and domain into groups of one size, so that the blocks of all groups are alike.

    The size is chosen to leave few slots empty and to make few groups: the 4 global and 22 local layers of Gemma 3 1B
    become one group and six of up to 4 layers.
    """
    kinds: dict[tuple[int | None, bool, RowDomain], list[int]] = {}
    for cache in caches:
        kinds.setdefault((cache.window, cache.chunked, cache.domain), []).append(cache.layer)
    kinds = kinds or {(None, False, TOKENS): []}
    counts = [max(len(layers), 1) for layers in kinds.values()]

    def cost(size: int) -> int:
        groups = sum(-(-count // size) for count in counts)
        return groups * size + groups

    size = min(range(1, min(counts) + 1), key=cost)
    return CacheLayout(
        tuple(
            CacheGroup(window, tuple(layers[begin : begin + size]), chunked, domain)
            for (window, chunked, domain), layers in kinds.items()
            for begin in range(0, max(len(layers), 1), size)
        )
    )


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Sizes of a graph's caches on a backend, in bytes.

    token_bytes: size of one token in all layers.
    block_token_bytes: size of one token in a block, which belongs to one group.
    state_bytes: size of all states of one sequence.
    formats: number type of the keys and values of each layer.
    num_parts: number of ranks that hold parts of each block. The sizes in bytes apply to the largest part.
    """

    layout: CacheLayout
    token_bytes: int
    block_token_bytes: int
    state_bytes: int = 0
    formats: tuple[str, ...] = ()
    num_parts: int = 1

    @property
    def format(self) -> str:
        """The number type of keys and values: `float16`, or for example `int8 (float16 in 1 of 24 layers)` if types are
        mixed.
        """
        counts = Counter(self.formats).most_common()
        rest = ", ".join(f"{name} in {count} of {len(self.formats)} layers" for name, count in counts[1:])
        return "none" if not counts else f"{counts[0][0]} ({rest})" if rest else counts[0][0]

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of a block of block_size tokens, at least 1."""
        return max(self.block_token_bytes, 1) * block_size

    def moved_bytes(self, block_size: int) -> int:
        """Return the bytes of a row of `octavo.batch.BlockBytes`: a block of block_size tokens, part after part."""
        return self.num_parts * self.block_token_bytes * block_size

    @property
    def moved_state_bytes(self) -> int:
        """The bytes of a moved slot of states, part after part."""
        return self.num_parts * self.state_bytes

    @property
    def bytes_per_seq(self) -> int:
        """The bytes of a running sequence's states, and of another set of states for embeddings or a cached prefix."""
        return STATES_PER_SEQUENCE * self.state_bytes

    def sequence_bytes(self, num_tokens: int, block_size: int, max_step_tokens: int) -> int:
        """Return the bytes of a sequence's states and of the most blocks that it holds at once."""
        num_blocks = self.layout.max_blocks(num_tokens, block_size, max_step_tokens)
        return num_blocks * self.block_bytes(block_size) + self.bytes_per_seq
