"""One scheduled step, with the output rows that are wanted from it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from octavo.engine.consumers.row_consumer import RowKind, RowUse
from octavo.engine.kv.block_tier import LoadedBlock
from octavo.engine.request import Sequence, SequenceGroup


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """The states after a sequence's first num_tokens tokens (full blocks), which a step writes to a slot.

    States that do not include any token of the step come from a store.
    """

    num_tokens: int
    slot: int


@dataclass(slots=True)
class ScheduledSequence:
    """One sequence's part of a step.

    rows: the row uses of the sequence's own consumers, then one for each choice that starts from the same prompt. Empty
    while the prompt is incomplete and none of its rows are wanted.
    """

    sequence: Sequence
    start: int  # position of the first token
    num_tokens: int
    rows: list[RowUse]
    copies: Iterable[tuple[int, int]] = ()  # cache blocks to copy before the step: source, destination
    state_copy: tuple[int, int] | None = None  # the same for the slot of its states
    snapshot: StateSnapshot | None = None
    loads: Collection[LoadedBlock] = ()  # blocks loaded from a store
    state_load: LoadedBlock | None = None  # states loaded from a store

    @property
    def num_drafts(self) -> int:
        """Number of guesses among its last tokens."""
        return max(self.start + self.num_tokens - len(self.sequence.token_ids), 0)

    @property
    def num_rows(self) -> int:
        return sum(use.count for use in self.rows)

    def move_back(self, count: int) -> None:
        """Record that `count` guesses of the previous step, still unknown when this one was scheduled, were wrong."""
        self.start -= count
        for use in self.rows:
            use.start -= count


@dataclass(slots=True)
class Schedule:
    """A step, and what is left of its budgets.

    is_ahead: scheduled while the previous step is still running and drawing some of this step's tokens.
    is_starved: blocks ran out, and no group was preempted to free some.
    """

    num_tokens_left: int
    num_rows_left: int
    num_groups_left: int
    is_ahead: bool = False
    is_starved: bool = False
    num_tokens_held_back: int = 0  # taken from the rest, so that the step does not become too long
    num_decodes: int = 0  # sequences that take one token; they are scheduled first
    skips_decodes: bool = False  # a prompt is computed alone while streams wait
    batch_rows_left: int | None = None  # for batches next to live requests; None if no batch group has asked yet
    chunk_start: int = 0  # where the first chunk begins in its sequence
    scheduled: dict[Sequence, ScheduledSequence] = field(default_factory=dict)

    @property
    def has_chunks(self) -> bool:
        return len(self.scheduled) > self.num_decodes

    def chunks(self) -> Iterator[ScheduledSequence]:
        """Return the chunks of prompts. They come after the decodes."""
        return islice(self.scheduled.values(), self.num_decodes, None)

    @property
    def num_decode_rows(self) -> int:
        """Number of decode tokens: one per sequence, plus its drafts."""
        return sum(item.num_tokens for item in islice(self.scheduled.values(), self.num_decodes))

    @property
    def groups(self) -> set[SequenceGroup]:
        """The groups that take part, including those whose choices start from the rows of another group."""
        rows = {use.sequence.group for item in self.scheduled.values() for use in item.rows}
        return rows | {sequence.group for sequence in self.scheduled}

    def rows(self) -> Iterator[tuple[RowUse, int, int]]:
        """Yield the uses of the step's rows, in output order.

        Each comes with two indices of its first row. The first counts rows of logits, or rows of hidden states if the
        use wants these. The second is the index of the row's token in the step.
        """
        num_logits = num_hidden = num_tokens = 0
        hidden = RowKind.HIDDEN  # looked up once, because enum members are slow
        for item in self.scheduled.values():
            for use in item.rows:
                token = num_tokens + use.start - item.start
                if use.consumer.kind is hidden:
                    yield use, num_hidden, token
                    num_hidden += use.count
                else:
                    yield use, num_logits, token
                    num_logits += use.count
            num_tokens += item.num_tokens

    def processed_rows(self) -> list[int]:
        """Return the rows of logits whose log-probabilities are to include bias, penalties, temperature and filters."""
        return [
            i
            for use, row, _ in self.rows()
            if use.consumer.kind is RowKind.SAMPLE and use.sequence.request.params.sampling.processed_logprobs
            for i in range(row, row + use.count)
        ]

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
