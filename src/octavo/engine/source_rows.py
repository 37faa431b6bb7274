"""The rows of encoded source texts in the step in which an answer begins. Later steps only need the number of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from octavo.batch import Batch, DomainRows, Float32, Int32
from octavo.engine.schedule import ScheduledSequence
from octavo.graph.source import SOURCE
from octavo.prompt import SourceText

RowsOfSource = Callable[[SourceText], "Float32 | None"]
"""Returns the rows that the encoder has computed for a source."""


def source_lengths(scheduled: Sequence[ScheduledSequence]) -> Int32:
    """Return the number of source rows in the cache for each sequence [N]."""
    return np.array([item.sequence.request.num_source_tokens for item in scheduled], np.int32)


def add_source_rows(
    batch: Batch, scheduled: Sequence[ScheduledSequence], lengths: Int32, block_size: int, rows_of: RowsOfSource
) -> None:
    """Fill the source fields of a batch.

    lengths: the number of source rows of each sequence [N].
    A sequence whose first token is in the step writes the keys and values of its source.
    """
    values, slots = [], []
    for index, item in enumerate(scheduled):
        source = item.sequence.request.prompt.source
        if item.start or source is None:
            continue
        rows = rows_of(source)
        assert rows is not None, "the scheduler waits for the rows of a source"
        values.append(rows)
        block, offset = np.divmod(np.arange(len(rows), dtype=np.int32), np.int32(block_size))
        slots.append(batch.block_tables[:, index, block] * np.int32(block_size) + offset)
    if not values:
        batch.domains = {**batch.domains, SOURCE.name: DomainRows(0, lengths=lengths)}
        return
    batch.inputs = (np.concatenate(values),)
    places = np.ascontiguousarray(np.concatenate(slots, axis=1))
    batch.domains = {**batch.domains, SOURCE.name: DomainRows(places.shape[1], lengths=lengths, slots=places)}
