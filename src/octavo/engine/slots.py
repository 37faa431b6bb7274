"""The slots of llama.cpp: names of the last prompts and answers, which can be saved to a file and restored from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from octavo.engine.request import Request


@dataclass(frozen=True, slots=True)
class SlotAction:
    """Saves what a slot holds to a file, restores it, or erases it.

    salt: of the request that filled the slot, or that is to find what is restored; others find the slot empty.
    max_tokens: saved at most; None: all.
    """

    kind: Literal["save", "restore", "erase"]
    slot: int
    path: str = ""
    salt: str = ""
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class SlotReport:
    """Tokens whose keys and values were saved, restored or erased, the bytes of the file, and the time."""

    num_tokens: int
    num_bytes: int = 0
    seconds: float = 0.0


class SlotContent(NamedTuple):
    """Prompt and answer of a request, and the keys of their full blocks."""

    token_ids: list[int]
    hashes: list[bytes]
    salt: str


class Slots:
    """The contents of slots by their numbers, which are those of the rows in a step unless requests name others."""

    def __init__(self) -> None:
        self._contents: dict[int, SlotContent] = {}

    def note(self, request: Request) -> None:
        """Puts the first choice of a request that has ended into its slot."""
        if request.slot >= 0 and request.sequences:
            sequence = request.sequences[0]
            salt = request.options.cache_salt
            self._contents[request.slot] = SlotContent(sequence.token_ids, sequence.block_hashes, salt)

    def put(self, slot: int, content: SlotContent) -> None:
        self._contents[slot] = content

    def content(self, slot: int, salt: str) -> SlotContent:
        """The content of a slot; empty if it belongs to another salt."""
        found = self._contents.get(slot)
        return found if found is not None and found.salt == salt else SlotContent([], [], salt)

    def erase(self, slot: int) -> None:
        self._contents.pop(slot, None)
