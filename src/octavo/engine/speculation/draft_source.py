"""The protocol of draft sources: guesses at the next tokens, from whatever a source knows.

A source is one file here. It guesses for each sequence; `acceptance` learns how often such guesses are right, and
`policy` decides how many of them a step computes. A wrong guess costs time, never an answer.
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
    """Guesses at the tokens after a sequence's own.

    levels: for each token, the strength of the evidence for it if those before it are right. Guesses of a source with
    the
    same level are right equally often; the source gives the numbers their meaning.
    """

    source: DraftOrigin
    token_ids: list[int]
    levels: list[int]


class Guesser(Protocol):
    """The knowledge of a source about one sequence."""

    def guess(self, tail: tuple[int, ...], limit: int) -> Draft | None:
        """At most `limit` tokens after those of the sequence and `tail`, its next tokens, or None without a guess."""


class DraftOrigin(Protocol):
    """The part of a source that is needed to learn how good it is.

    name: as metrics show it.
    """

    name: str

    def prior(self, level: int) -> float:
        """Return the share of right guesses to assume for a level before any was tried."""


class DraftSource(DraftOrigin, Protocol):
    """Guesses from one kind of knowledge.

    max_drafts: per sequence in one step.
    """

    max_drafts: int

    def open(self, sequence: Sequence) -> Guesser | None:
        """Return the guesser of a sequence that starts its answer, or None if the source knows nothing about it."""
