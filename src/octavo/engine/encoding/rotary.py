"""Token positions with several components, for text mixed with images whose rows form a plane."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.batch import Int32
from octavo.image_layout import ImageTile
from octavo.prompt import Prompt, Span

_COMPONENTS = 3  # time, row, column


@dataclass(frozen=True, slots=True, eq=False)
class RotaryPositions:
    """Positions of a sequence's tokens.

    prompt: int32 [components, prompt tokens].
    shift: offset of later positions from their index in the sequence.
    """

    prompt: Int32
    shift: int

    def of(self, start: int, end: int) -> Int32:
        """Return the positions of tokens [start, end) of the sequence: [components, end - start]."""
        components, count = self.prompt.shape
        known = self.prompt[:, start : min(end, count)]
        if end <= count:
            return known
        later = np.arange(max(start, count), end, dtype=np.int32) + np.int32(self.shift)
        return np.concatenate([known, np.broadcast_to(later, (components, len(later)))], axis=1)


def rotary_positions(prompt: Prompt, merge_size: int) -> RotaryPositions | None:
    """Return the positions of a prompt with images, or None for text alone.

    Each row of an image stands for a block of merge_size^2 patches of a tile.
    Text advances all components at once. Within a tile, the time stays fixed, and the rows and columns count up from
    the position at which the tile begins. The text after a tile continues after the largest row or column, even if the
    time of a video is later, and so do the tokens after the prompt, as in transformers. Wang et al., arXiv 2409.12191.
    """
    if not prompt.items:
        return None
    parts, index, position, first = [], 0, 0, 0
    for span in prompt.spans:
        tile = _tile(span)
        if tile is None:
            continue
        rows, cols, time = tile.grid_rows // merge_size, tile.grid_cols // merge_size, 0
        if tile.time is not None and span.start == index:  # a later frame of a video counts from its first frame
            time = tile.time
        else:
            parts.append(_text(position, span.start - index))
            first = position + span.start - index
        places = np.mgrid[:rows, :cols].reshape(2, -1)
        parts.append(first + np.concatenate([np.full((1, places.shape[1]), time, places.dtype), places]))
        index, position = span.end, first + max(rows, cols)
    parts.append(_text(position, len(prompt) - index))
    found = np.concatenate(parts, axis=1).astype(np.int32)
    return RotaryPositions(found, position - index)


def span_positions(prompt: Prompt) -> RotaryPositions | None:
    """Return the position and the last visible position of each token, or None if the prompt has no spans.

    All positions of a span can see each other.
    """
    if not prompt.spans:
        return None
    own = np.arange(len(prompt), dtype=np.int32)
    last = own.copy()
    for span in prompt.spans:
        last[span.start : span.end] = span.end - 1
    return RotaryPositions(np.stack([own, last]), 0)


def _text(position: int, count: int) -> Int32:
    return np.broadcast_to(np.arange(position, position + count, dtype=np.int32), (_COMPONENTS, count))


def _tile(span: Span) -> ImageTile | None:
    """Return the tile that a span covers, or None if the span is not a whole tile."""
    if span.item is None:
        return None
    begin = 0
    for tile in span.item.layout.tiles:
        if begin == span.offset and tile.num_tokens == span.length:
            return tile
        begin += tile.num_tokens
    return None
