"""The rows for the spans of prompts in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from octavo.batch import Batch, DomainRows, Float32
from octavo.engine.schedule import ScheduledSequence
from octavo.graph.spans import SPAN_ROWS, SPANS
from octavo.graph.values import TOKENS
from octavo.prompt import Span

RowsOf = Callable[[Span], "Float32 | None"]
"""Returns the rows of a span, including rows that an encoder has computed."""


def add_spans(batch: Batch, scheduled: Iterable[ScheduledSequence], rows_of: RowsOf) -> None:
    """Fill the span fields of a batch if any tokens of the step are in spans.

    A chunk that ends within a span takes only its part of the span.
    """
    values, index = [], np.full(len(batch.token_ids), -1, np.int32)
    count = 0
    for item, begin in zip(scheduled, batch.query_start_loc.tolist(), strict=False):
        end = item.start + item.num_tokens
        for span in item.sequence.request.prompt.overlapping(item.start, end):
            rows = rows_of(span)
            assert rows is not None, "the scheduler waits for rows, and the request factory refuses spans without any"
            first, last = max(span.start, item.start), min(span.end, end)
            values.append(rows[first - span.start : last - span.start])
            offset = begin - item.start
            index[offset + first : offset + last] = np.arange(count, count + last - first)
            count += last - first
    if values:
        batch.inputs = (np.concatenate(values),)
        batch.domains = {
            SPANS.name: DomainRows(count),
            TOKENS.name: DomainRows(len(index), indices={SPAN_ROWS.name: index}),
        }


def add_rotary(batch: Batch, scheduled: list[ScheduledSequence], components: int) -> None:
    """Fill in positions with several components if any sequence of the step has a prompt with images."""
    if all(item.sequence.request.rotary is None for item in scheduled):
        return
    parts = []
    for item, begin in zip(scheduled, batch.query_start_loc.tolist(), strict=False):
        rotary, end = item.sequence.request.rotary, begin + item.num_tokens
        if rotary is None:
            parts.append(np.broadcast_to(batch.positions[begin:end], (components, item.num_tokens)))
        else:
            parts.append(rotary.of(item.start, item.start + item.num_tokens))
    known = batch.domains.get(TOKENS.name, DomainRows(len(batch.positions)))
    positions = np.ascontiguousarray(np.concatenate(parts, axis=1), np.int32)
    batch.domains = {**batch.domains, TOKENS.name: replace(known, positions=positions)}


def values_of(span: Span) -> Float32 | None:
    """Return the values that came with a span."""
    return span.values
