"""The protocol of row consumers. A consumer requests rows of a step and turns them into results.

Every use of rows is one class. It names the tokens whose rows it wants and turns those rows into an `Outcome`, so the
scheduler, the batch builder and the engine need not know the kinds of requests.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from octavo.batch import StepOutput
    from octavo.engine.request import FinishReason, Request, Sequence


class RowKind(enum.Enum):
    """The content of a row in a step's output."""

    SAMPLE = "sample"  # the next token, drawn by the sequence's parameters
    LOGPROB = "logprob"  # the log-probability of the token that follows
    HIDDEN = "hidden"  # the last hidden state


@dataclass(slots=True)  # not frozen: steps make one per sequence, and frozen ones take three times as long
class RowUse:
    """One consumer's use of rows in a step: the rows of a sequence's tokens from start to start + count."""

    consumer: RowConsumer
    sequence: Sequence  # whose parameters apply: the computing one, or a choice that shares its prompt
    start: int
    count: int


@dataclass(slots=True)  # like `RowUse`
class Outcome:
    """The consequences of a consumer's rows for its group. The engine carries them out.

    tokens: new tokens for each use, in the order of the uses; further drafts are dropped. Empty if no sequence
    continues by itself.
    finish: the reason if the group ends, otherwise None.
    members: the next members as (parent, child) pairs; a child shares its parent's blocks.
    num_tokens: number of generated tokens, for the request's times and counts.
    """

    tokens: list[list[int]]
    num_tokens: int = 0
    finish: FinishReason | None = None
    members: list[tuple[Sequence, Sequence]] | None = None


class RowConsumer:
    """Uses the rows of a request's sequences: logits or hidden states, one row per computed token.

    Each consumer of a group wants a range of tokens; together the ranges reach the last token.
    """

    kind: ClassVar[RowKind]
    takes_drafts: ClassVar[bool] = False  # whether it takes the rows of drafts and decides which are right

    def wanted(self, sequence: Sequence) -> tuple[int, int]:
        """Return the positions [start, end) of the tokens whose rows are wanted next.

        These tokens must be computed, not taken from the cache. By default, the row that predicts the next token is
        wanted.
        """
        return len(sequence.token_ids) - 1, len(sequence.token_ids)

    def num_logprobs(self, request: Request) -> int:  # noqa: ARG002
        """Return how many of the most likely tokens to report besides the row's own token.

        -1 means that no log-probabilities are wanted.
        """
        return -1

    def goes_on(self, sequence: Sequence) -> bool:  # noqa: ARG002
        """True if the next step is known in advance: it computes the row's token, unless that token ends the text."""
        return False

    def consume(self, uses: list[tuple[RowUse, int]], output: StepOutput) -> Outcome:
        """Consume the rows of a step. Each use comes with the index of its first row."""
        raise NotImplementedError
