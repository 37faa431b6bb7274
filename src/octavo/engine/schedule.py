"""One step: the sequences that compute, how many tokens each, and the rows of output that are wanted of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from octavo.engine.request import RowUse, Sequence


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

    @property
    def num_rows(self) -> int:
        return sum(use.count for use in self.rows)


@dataclass(slots=True)
class Schedule:
    """A step, and the rest of its budgets.

    is_ahead: the step before it still runs, and produces the one token of each sequence.
    """

    num_tokens_left: int
    num_rows_left: int
    is_ahead: bool = False
    gives_hidden_states: bool = False  # in place of logits
    num_streams: int = 0  # of a step that gives hidden states: running sequences that wait for its end
    num_tokens_held_back: int = 0  # removed from the rest, so that the step does not become too long
    num_decodes: int = 0  # sequences whose one token came before all chunks; they are the first that are scheduled
    skips_decodes: bool = False  # a prompt is computed alone, while others could have had their next token
    chunk_start: int = 0  # where the first chunk begins in its sequence
    scheduled: dict[Sequence, ScheduledSequence] = field(default_factory=dict)

    @property
    def has_chunks(self) -> bool:
        return len(self.scheduled) > self.num_decodes

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
