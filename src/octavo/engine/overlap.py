"""Scheduling a step while the one before it still runs: with its tokens as if they were there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from octavo.engine.consumers.row_consumer import RowKind
from octavo.engine.request import RequestStatus, Sequence
from octavo.engine.schedule import Schedule, ScheduledSequence

UNKNOWN_TOKEN = -1  # a token that the step in flight draws


def can_be_foreseen(step: Schedule) -> bool:
    """True if all that a step in flight leaves open is which tokens it draws, and these decide no array of the next.

    So no sequence has to wait for its token because of a grammar, penalties, biases, drafts or beams.
    """
    items = [item for item in step.scheduled.values() if item.sequence.status is RequestStatus.RUNNING]
    return not step.is_starved and all(_can_be_foreseen(item) for item in items)


def _can_be_foreseen(item: ScheduledSequence) -> bool:
    sequence = item.sequence
    if sequence.draft_token_ids or len(sequence.group.members) > 1:
        return False
    if any(use.sequence is not sequence for use in item.rows):
        return False
    return not _draws(item) or _ends(sequence) or item.rows[-1].consumer.goes_on(sequence)


def _draws(item: ScheduledSequence) -> bool:
    return bool(item.rows) and item.rows[-1].consumer.kind is RowKind.SAMPLE


def _ends(sequence: Sequence) -> bool:
    """True if the next token is the last, whatever it is."""
    return len(sequence.token_ids) + 1 >= sequence.request.max_total_tokens


@contextmanager
def as_if_done(step: Schedule) -> Iterator[dict[Sequence, int]]:
    """Lets the sequences of a step in flight look as after it, with UNKNOWN_TOKEN for tokens that it draws.

    Yields the rows of the step's output that hold these tokens. Sequences that end with the step have nothing to do.
    """
    last_rows = {
        use.sequence: row + use.count - 1 for use, row, _ in step.rows() if use.consumer.kind is RowKind.SAMPLE
    }
    sources: dict[Sequence, int] = {}
    computed: list[tuple[Sequence, int]] = []
    for item in step.scheduled.values():
        sequence = item.sequence
        if sequence.status is not RequestStatus.RUNNING:  # it has ended since it was scheduled
            continue
        computed.append((sequence, sequence.num_computed_tokens))
        sequence.num_computed_tokens += item.num_tokens
        if _draws(item) and not _ends(sequence):
            sequence.token_ids.append(UNKNOWN_TOKEN)
            sources[sequence] = last_rows[sequence]
    try:
        yield sources
    finally:
        for sequence, num_tokens in computed:
            sequence.num_computed_tokens = num_tokens
        for sequence in sources:
            sequence.token_ids.pop()
