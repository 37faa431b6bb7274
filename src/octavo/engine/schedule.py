"""One step, with the rows of output that are wanted of it, and the queue that its sequences come from."""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter

from octavo.engine.consumers.row_consumer import RowKind, RowUse
from octavo.engine.request import RequestStatus, Sequence, SequenceGroup

_by_key = attrgetter("key")


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """The states of a sequence after its first num_tokens tokens, full blocks, which a step writes to a slot."""

    num_tokens: int
    slot: int


@dataclass(slots=True)
class ScheduledSequence:
    """One sequence's part of a step.

    rows: those of its own consumers, then one for each choice that starts from the same prompt. Empty while the prompt
    is incomplete and none of its rows are wanted.
    """

    sequence: Sequence
    start: int  # position of the first token
    num_tokens: int
    rows: list[RowUse]
    copies: Iterable[tuple[int, int]] = ()  # cache blocks to copy before the step: source, destination
    state_copy: tuple[int, int] | None = None  # the same for the slot of its states
    snapshot: StateSnapshot | None = None

    @property
    def num_rows(self) -> int:
        return sum(use.count for use in self.rows)


@dataclass(slots=True)
class Schedule:
    """A step, and the rest of its budgets.

    is_ahead: it is scheduled while the step before it still runs, which draws some of its tokens. is_starved: blocks
    ran out, and nobody was preempted for that.
    """

    num_tokens_left: int
    num_rows_left: int
    num_groups_left: int
    is_ahead: bool = False
    is_starved: bool = False
    num_tokens_held_back: int = 0  # removed from the rest, so that the step does not become too long
    num_decodes: int = 0  # sequences whose next token came before all chunks; they are the first that are scheduled
    skips_decodes: bool = False  # a prompt is computed alone, while others could have had their next token
    chunk_start: int = 0  # where the first chunk begins in its sequence
    scheduled: dict[Sequence, ScheduledSequence] = field(default_factory=dict)

    @property
    def has_chunks(self) -> bool:
        return len(self.scheduled) > self.num_decodes

    @property
    def num_decode_rows(self) -> int:
        """Tokens of the decodes: one each, and their drafts."""
        return sum(item.num_tokens for item in islice(self.scheduled.values(), self.num_decodes))

    @property
    def groups(self) -> set[SequenceGroup]:
        """The groups that take part, also those whose choices start from the rows of another."""
        rows = {use.sequence.group for item in self.scheduled.values() for use in item.rows}
        return rows | {sequence.group for sequence in self.scheduled}

    def rows(self) -> Iterator[tuple[RowUse, int, int]]:
        """The uses of the rows of the step in the order of its output.

        Each comes with the index of its first row among the logits or the hidden states, whichever it wants, and of
        that row's token in the step.
        """
        num_logits = num_hidden = num_tokens = 0
        for item in self.scheduled.values():
            for use in item.rows:
                token = num_tokens + use.start - item.start
                if use.consumer.kind is RowKind.HIDDEN:
                    yield use, num_hidden, token
                    num_hidden += use.count
                else:
                    yield use, num_logits, token
                    num_logits += use.count
            num_tokens += item.num_tokens

    def add(self, item: ScheduledSequence) -> None:
        self.num_tokens_left -= item.num_tokens
        self.num_rows_left -= item.num_rows
        self.scheduled[item.sequence] = item

    def remove(self, sequence: Sequence) -> None:
        if sequence not in self.scheduled:
            return
        if sequence in islice(self.scheduled, self.num_decodes):
            self.num_decodes -= 1
        item = self.scheduled.pop(sequence)
        self.num_tokens_left += item.num_tokens
        self.num_rows_left += item.num_rows


class ServiceQueue:
    """The groups that wait and run, both in order of service, and the seats that are taken."""

    def __init__(self) -> None:
        self.waiting: list[SequenceGroup] = []
        self.running: list[SequenceGroup] = []
        self.num_seats_taken = 0
        self.num_texts_waiting = 0

    @property
    def sequences(self) -> list[Sequence]:
        """The running sequences, in order of service."""
        return [member for group in self.running for member in group.members]

    def wait(self, group: SequenceGroup) -> None:
        insort(self.waiting, group, key=_by_key)
        self.num_texts_waiting += group.is_text

    def enter(self, group: SequenceGroup) -> None:
        """Moves a group to the running ones."""
        self._stop_waiting(group)
        insort(self.running, group, key=_by_key)
        self.num_seats_taken += group.num_seats
        for member in group.members:
            member.status = RequestStatus.RUNNING

    def leave(self, group: SequenceGroup, status: RequestStatus) -> None:
        """Removes a group."""
        if group.status is RequestStatus.RUNNING:
            _discard(self.running, group)
            self.num_seats_taken -= group.num_seats
        self._stop_waiting(group)
        for member in group.members:
            member.status = status

    def _stop_waiting(self, group: SequenceGroup) -> None:
        self.num_texts_waiting -= group.is_text * _discard(self.waiting, group)


class Stages:
    """The steps in flight of a pipeline: a group is in one of them at most, and each has its share of the groups.

    busy: the groups that are in one. Without a pipeline nothing is noted.
    """

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self.busy: set[SequenceGroup] = set()

    def begin(self, step: Schedule) -> None:
        """Notes that a step is in flight."""
        if self._num_stages > 1:
            self.busy |= step.groups

    def end(self, step: Schedule) -> None:
        """Notes that it has ended."""
        if self._num_stages > 1:
            self.busy -= step.groups

    def share(self, num_groups: int) -> int:
        """The most of these groups for one step, so that every stage has some. Without a pipeline there is no limit."""
        return -(-num_groups // self._num_stages) if self._num_stages > 1 else sys.maxsize

    def last_idle(self, queue: ServiceQueue) -> SequenceGroup | None:
        """The last running group, in the order of service, that is in no step in flight."""
        return next((group for group in reversed(queue.running) if group not in self.busy), None)


def _discard(groups: list[SequenceGroup], group: SequenceGroup) -> bool:
    """Removes a group from a list in order of service; False: it is not there."""
    position = bisect_left(groups, group.key, key=_by_key)
    is_there = position < len(groups) and groups[position] is group
    if is_there:
        del groups[position]
    return is_there
