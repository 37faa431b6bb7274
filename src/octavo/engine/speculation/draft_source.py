"""The protocol of draft sources: each guesses next tokens from one kind of knowledge.

Each source is one file in this folder. It makes guesses for each sequence; `acceptance` learns how often such guesses
are right, and `policy` decides how many of them a step computes. A wrong guess costs time but never changes an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from octavo.engine.request import Sequence

PREDICTION = "prediction"  # the source that requests bring along
# The sources that run a model. An engine has at most one, and it may fail.
DRAFT_MODEL, MTP, EAGLE3, ASSISTANT = DRAFTERS = ("draft_model", "mtp", "eagle3", "assistant")


@dataclass(slots=True)
class Draft:
    """Guesses at the tokens that follow a sequence.

    levels: for each token, the strength of the evidence for it, assuming that the tokens before it are right. A
    source's guesses with the same level are right equally often; each source defines its own levels.
    """

    source: DraftOrigin
    token_ids: list[int]
    levels: list[int]


class Guesser(Protocol):
    """A draft source's knowledge of one sequence."""

    def guess(self, tail: tuple[int, ...], limit: int) -> Draft | None:
        """Guess at most `limit` tokens that follow the sequence's tokens and `tail`, its next tokens.

        Return None if there is nothing to guess from.
        """


class DraftOrigin(Protocol):
    """The part of a draft source that `Acceptance` needs to learn how often its guesses are right.

    name: the name shown in metrics.
    """

    name: str

    def prior(self, level: int) -> float:
        """Return the share of right guesses to assume for a level before any were tried."""


class DraftSource(DraftOrigin, Protocol):
    """A source of drafts that guesses from one kind of knowledge.

    max_drafts: limit per sequence in one step.
    """

    max_drafts: int

    def open(self, sequence: Sequence) -> Guesser | None:
        """Return the guesser for a sequence that starts its answer, or None if the source knows nothing about it."""
