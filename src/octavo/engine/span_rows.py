"""The rows of the spans of prompts in a step."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from octavo.batch import Batch, DomainRows
from octavo.engine.schedule import ScheduledSequence
from octavo.graph.spans import SPAN_ROWS, SPANS
from octavo.graph.values import TOKENS


def add_spans(batch: Batch, scheduled: Iterable[ScheduledSequence]) -> None:
    """Fills the fields of a batch about spans, if tokens of the step are in some. A chunk has its part of a span."""
    values, index = [], np.full(len(batch.token_ids), -1, np.int32)
    count = 0
    for item, begin in zip(scheduled, batch.query_start_loc.tolist(), strict=False):
        end = item.start + item.num_tokens
        for span in item.sequence.request.prompt.overlapping(item.start, end):
            assert span.values is not None, "the request factory refuses spans without values"
            first, last = max(span.start, item.start), min(span.end, end)
            values.append(span.values[first - span.start : last - span.start])
            offset = begin - item.start
            index[offset + first : offset + last] = np.arange(count, count + last - first)
            count += last - first
    if values:
        batch.inputs = (np.concatenate(values),)
        batch.domains = {
            SPANS.name: DomainRows(count),
            TOKENS.name: DomainRows(len(index), indices={SPAN_ROWS.name: index}),
        }
