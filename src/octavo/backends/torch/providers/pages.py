"""Keys and values of single sequences, gathered from a layer's pages for libraries without paging."""

from __future__ import annotations

from torch import Tensor

from octavo.backends.torch.cache import LayerPages
from octavo.backends.torch.step_arrays import EqualSequences
from octavo.graph.ops.attention import AttentionParams


def first_key(p: AttentionParams, end: int, tokens: int, block_size: int) -> int:
    """Return the position of the first key in the first block that the last `tokens` tokens of a sequence of length
    `end` see.
    """
    if p.window is None:
        return 0
    return max(end - tokens + 1 - p.window, 0) // block_size * block_size


def gathered(pages: LayerPages, p: AttentionParams, some: EqualSequences, number: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values [heads, keys, dim] that sequence `number` of `some` sees."""
    block_size, tokens = pages.keys.shape[2], some.positions.shape[1]
    end = some.ends[number]
    first = first_key(p, end, tokens, block_size)
    table = some.windows[pages.group].tables[number, first // block_size : -(-end // block_size)].long()

    def of(numbers: Tensor) -> Tensor:
        return numbers[table].transpose(0, 1).flatten(1, 2)[:, : end - first]

    return of(pages.keys), of(pages.values)
