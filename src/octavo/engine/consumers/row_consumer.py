"""The protocol of row consumers: which rows of a step they want, and what becomes of these.

A new use of rows is one class here. It says of which tokens it wants the rows, and makes an `Outcome` of them; the
scheduler, the batch builder and the engine know no kind of request.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from octavo.batch import StepOutput
    from octavo.engine.request import FinishReason, Request, Sequence


class RowKind(enum.Enum):
    """Meaning of a row of a step's output."""

    SAMPLE = "sample"  # the next token, drawn by the sequence's parameters
    LOGPROB = "logprob"  # the log-probability of the token that follows
    HIDDEN = "hidden"  # the last hidden state


@dataclass(slots=True)  # not frozen: every step makes one of every sequence, which then takes thrice as long
class RowUse:
    """The rows of one sequence in a step for one consumer: those of the tokens from start to start + count."""

    consumer: RowConsumer
    sequence: Sequence  # whose parameters hold: the one that computes, or a choice that starts from the same prompt
    start: int
    count: int


@dataclass(slots=True)  # as `RowUse`
class Outcome:
    """The consequences of a consumer's rows for its group, which the engine carries out.

    tokens: new tokens of the sequence of each use, in the order of the uses; drafts beyond them are dropped. Empty: no
    sequence goes on by itself.
    finish: the group ends.
    members: the next members, as (parent, child): children share their parents' blocks.
    num_tokens: generated tokens, which the times and counts of the request take in.
    """

    tokens: list[list[int]]
    num_tokens: int = 0
    finish: FinishReason | None = None
    members: list[tuple[Sequence, Sequence]] | None = None


class RowConsumer:
    """A use of the rows of a request's sequences: logits or hidden states, one row per computed token.

    Each consumer of a group wants a range of tokens; together they want the tokens up to the last.
    """

    kind: ClassVar[RowKind]
    takes_drafts: ClassVar[bool] = False  # whether it takes the rows of guesses, and tells which are right

    def wanted(self, sequence: Sequence) -> tuple[int, int]:
        """Positions [start, end) of the tokens whose rows are wanted next; none of them may come from the cache.

        As for most consumers: the row that gives the next token.
        """
        return len(sequence.token_ids) - 1, len(sequence.token_ids)

    def num_logprobs(self, request: Request) -> int:  # noqa: ARG002
        """The number of most likely tokens reported beside the token of a row; -1: no log-probabilities at all."""
        return -1

    def goes_on(self, sequence: Sequence) -> bool:  # noqa: ARG002
        """True if the next step is known in advance: it computes the row's token, unless that ends the text."""
        return False

    def consume(self, uses: list[tuple[RowUse, int]], output: StepOutput) -> Outcome:
        """Take the rows of a step, each use with the index of its first row."""
        raise NotImplementedError
