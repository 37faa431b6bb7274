"""The protocol of draft sources: guesses at the tokens that follow, from whatever a source knows.

A source is one file here. It says for each sequence what it would guess; `acceptance` learns how often such guesses are
right, and `policy` decides how many of them a step computes. A wrong guess costs time, never an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from octavo.engine.request import Sequence

PREDICTION = "prediction"  # the source that requests bring with them
# The sources that compute, of which an engine has one at most; it may fail.
DRAFT_MODEL, MTP, EAGLE3, ASSISTANT = DRAFTERS = ("draft_model", "mtp", "eagle3", "assistant")


@dataclass(slots=True)
class Draft:
    """Guesses at the tokens after a sequence's own.

    levels: of each token, the strength of what speaks for it if those before it are right. Guesses of a source with the
    same level are right equally often; the source gives the numbers their meaning.
    """

    source: DraftOrigin
    token_ids: list[int]
    levels: list[int]


class Guesser(Protocol):
    """The knowledge of a source about one sequence."""

    def guess(self, tail: tuple[int, ...], limit: int) -> Draft | None:
        """At most `limit` tokens after those of the sequence and `tail`, which will be its next; None means no idea."""


class DraftOrigin(Protocol):
    """The part of a source that is needed to learn how good it is.

    name: as metrics show it.
    """

    name: str

    def prior(self, level: int) -> float:
        """The share of right guesses of a level to assume before any was tried."""


class DraftSource(DraftOrigin, Protocol):
    """Guesses from one kind of knowledge.

    max_drafts: of a sequence in one step.
    """

    max_drafts: int

    def open(self, sequence: Sequence) -> Guesser | None:
        """The guesser of a sequence that begins its answer, or None if there is nothing to know about it."""
