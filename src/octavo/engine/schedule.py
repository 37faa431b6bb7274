"""One step, with the rows of output that are wanted of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from octavo.engine.consumers.row_consumer import RowKind, RowUse
from octavo.engine.kv.block_tier import LoadedBlock
from octavo.engine.request import Sequence, SequenceGroup


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """The states of a sequence after its first num_tokens tokens, full blocks, which a step writes to a slot.

    Those after the tokens before the step come from a store.
    """

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
    loads: Collection[LoadedBlock] = ()  # blocks that come from a store
    state_load: LoadedBlock | None = None  # states that do

    @property
    def num_drafts(self) -> int:
        """The last of its tokens, which are guesses."""
        return max(self.start + self.num_tokens - len(self.sequence.token_ids), 0)

    @property
    def num_rows(self) -> int:
        return sum(use.count for use in self.rows)

    def move_back(self, count: int) -> None:
        """Note that the step before had so many wrong guesses, which this one was scheduled without knowing."""
        self.start -= count
        for use in self.rows:
            use.start -= count


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
    batch_rows_left: int | None = None  # for batches beside live requests; None if no group of a batch has asked yet
    chunk_start: int = 0  # where the first chunk begins in its sequence
    scheduled: dict[Sequence, ScheduledSequence] = field(default_factory=dict)

    @property
    def has_chunks(self) -> bool:
        return len(self.scheduled) > self.num_decodes

    def chunks(self) -> Iterator[ScheduledSequence]:
        """The parts of prompts, which come behind the decodes."""
        return islice(self.scheduled.values(), self.num_decodes, None)

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
        hidden = RowKind.HIDDEN  # looked up once: the members of an enum take long
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
        """The rows of logits whose log-probabilities are wanted of the distribution that tokens are drawn from."""
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
