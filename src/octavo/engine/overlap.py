"""Schedules a step while the previous one still runs, as if its tokens were already known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from octavo.batch import LateTokens
from octavo.engine.consumers.row_consumer import RowKind
from octavo.engine.request import RequestStatus, Sequence
from octavo.engine.schedule import Schedule, ScheduledSequence

UNKNOWN_TOKEN = -1  # a token drawn by the step in flight
GUESS = -2  # a guess made by a draft model while it runs


class DrawnRows(NamedTuple):
    """The rows of a step in flight that draw the next tokens of a sequence.

    row: the first of these rows.
    token: index, in the step, of that row's token; the next num_drafts tokens are guesses, with one row each.
    """

    row: int
    token: int
    num_drafts: int


_NOTHING = DrawnRows(0, 0, 0)


def can_be_foreseen(step: Schedule, *, settles_drafts: bool = False) -> bool:
    """True if only the tokens of a step in flight are still unknown, and no array of the next step depends on them.

    This is false if a sequence must wait for its token because of a grammar, penalties, biases, drafts or beams.
    settles_drafts: the device finds the right drafts by itself.
    """
    items = [item for item in step.scheduled.values() if item.sequence.status is RequestStatus.RUNNING]
    if not settles_drafts and any(item.sequence.draft_token_ids for item in items):
        return False
    return not step.is_starved and all(_can_be_foreseen(item) for item in items)


def _can_be_foreseen(item: ScheduledSequence) -> bool:
    sequence = item.sequence
    if len(sequence.group.members) > 1 or any(use.sequence is not sequence for use in item.rows):
        return False
    return not _draws(item) or _ends(item) or item.rows[-1].consumer.goes_on(sequence)


def _draws(item: ScheduledSequence) -> bool:
    return bool(item.rows) and item.rows[-1].consumer.kind is RowKind.SAMPLE


def _ends(item: ScheduledSequence) -> bool:
    """True if the next token is certainly the last, or would be the last if all guesses were right."""
    return len(item.sequence.token_ids) + item.rows[-1].count >= item.sequence.request.max_total_tokens


def late_tokens(drawn: Iterable[DrawnRows | None], *, only_outputs: bool = False) -> LateTokens | None:
    """Return `Batch.late` for sequences, or None if none of them had guesses.

    drawn: the rows of each sequence, or None if it draws nothing.
    """
    found = np.array([_NOTHING if each is None else each for each in drawn], np.int32).reshape(-1, 3)
    rows, tokens, counts = np.ascontiguousarray(found.T)
    return LateTokens(rows, tokens, counts, only_outputs) if counts.any() else None


@contextmanager
def as_if_done(step: Schedule) -> Iterator[dict[Sequence, DrawnRows]]:
    """Make the sequences of a step in flight look finished, with UNKNOWN_TOKEN for the tokens it draws.

    All guesses are assumed to be right. Yields the rows that draw the tokens of each sequence. Sequences that end with
    the step are left out.
    """
    rows = {
        use.sequence: DrawnRows(row, token, use.count - 1)
        for use, row, token in step.rows()
        if use.consumer.kind is RowKind.SAMPLE
    }
    drawn: dict[Sequence, DrawnRows] = {}
    before: list[tuple[Sequence, int, list[int]]] = []
    for item in step.scheduled.values():
        sequence = item.sequence
        if sequence.status is not RequestStatus.RUNNING:  # it has ended since it was scheduled
            continue
        before.append((sequence, sequence.num_computed_tokens, sequence.draft_token_ids))
        if _draws(item) and not _ends(item):
            drawn[sequence] = rows[sequence]
            sequence.token_ids += [UNKNOWN_TOKEN] * (drawn[sequence].num_drafts + 1)
        sequence.num_computed_tokens += item.num_tokens
        sequence.draft_token_ids = []
    try:
        yield drawn
    finally:
        for sequence, num_tokens, drafts in before:
            sequence.num_computed_tokens, sequence.draft_token_ids = num_tokens, drafts
        for sequence, found in drawn.items():
            del sequence.token_ids[-1 - found.num_drafts :]
