"""The encoded rows of images and sources: which are available, and the order in which to compute the missing ones."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from octavo.prompt import Prompt, SourceText, Span

if TYPE_CHECKING:
    from octavo.batch import Float32
    from octavo.engine.encoding.row_encoder import Item, RowEncoder
    from octavo.engine.metrics import EngineMetrics

logger = logging.getLogger(__name__)


class Encodings:
    """Encoded rows by item key. Items are encoded when the scheduler asks for their rows.

    The rows are kept within a byte limit. The oldest are dropped first, except those that a running sequence still
    needs.
    """

    def __init__(self, encoder: RowEncoder, max_bytes: int) -> None:
        self.encoder = encoder
        self.num_bytes = 0
        self.metrics: EngineMetrics | None = None  # counts the encoder's work
        self._max_bytes = max_bytes
        self._rows: OrderedDict[bytes, Float32] = OrderedDict()
        self._wanted: dict[bytes, Item] = {}

    @property
    def has_work(self) -> bool:
        """True if wanted rows are still missing."""
        return bool(self._wanted)

    def begin_round(self) -> None:
        """Forget which rows are wanted; the scheduler will ask again."""
        self._wanted.clear()

    def rows_of(self, span: Span) -> Float32 | None:
        """Return the rows of a span, or None if they are not encoded yet."""
        if span.item is None:
            return span.values
        rows = self._rows.get(span.item.key)
        if rows is None:
            return None
        self._rows.move_to_end(span.item.key)
        return rows[span.offset : span.offset + span.length]

    def rows_of_source(self, source: SourceText) -> Float32 | None:
        """Return the rows of a source, or None if they are not encoded yet."""
        rows = self._rows.get(source.key)
        if rows is not None:
            self._rows.move_to_end(source.key)
        return rows

    def num_ready(self, prompt: Prompt, start: int, count: int) -> int:
        """Return how many of the `count` tokens from `start` on can be computed with the rows that are available.

        They end before the first missing row, and that row is then requested. The first token of a prompt needs the
        rows of its source.
        """
        if prompt.source is not None and start == 0 and self.rows_of_source(prompt.source) is None:
            self._wanted.setdefault(prompt.source.key, prompt.source)
            return 0
        for span in prompt.overlapping(start, start + count):
            if self.rows_of(span) is None:
                assert span.item is not None
                self._wanted.setdefault(span.item.key, span.item)
                return max(span.start - start, 0)
        return count

    def work(self, seconds: float | None, needed: Callable[[], Iterable[bytes]]) -> None:
        """Run the encoder for about `seconds`, or until the items of its current step are done.

        needed: returns the keys of the items that running sequences have to compute.
        """
        encoder = self.encoder
        if not any(item.key in self._wanted for item in encoder.items):
            encoder.begin(self._next_items())
        started_at = time.perf_counter()
        found = encoder.run(seconds)
        elapsed_s = time.perf_counter() - started_at
        for item, rows in found:
            self._wanted.pop(item.key, None)
            self._rows[item.key] = rows
            self.num_bytes += rows.nbytes
        if self.metrics is not None:
            self.metrics.encoder_s_total += elapsed_s
            self.metrics.num_items_encoded_total += len(found)
        if self.num_bytes > self._max_bytes:
            self._evict({*needed(), *(item.key for item, _ in found)})

    def _next_items(self) -> list[Item]:
        """Return the first wanted item and the following ones that fit into the same step."""
        items: list[Item] = []
        left = self.encoder.max_inputs
        for item in self._wanted.values():
            if items and item.num_inputs > left:
                break
            items.append(item)
            left -= item.num_inputs
        return items

    def _evict(self, needed: set[bytes]) -> None:
        for key in [key for key in self._rows if key not in needed]:
            if self.num_bytes <= self._max_bytes:
                return
            self.num_bytes -= self._rows.pop(key).nbytes
