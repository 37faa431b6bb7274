"""The actions on slots, which are llama.cpp's names of the last prompts and answers, and their reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class SlotAction:
    """Saves what a slot holds to a file, restores it, or erases it.

    salt: of the request that filled the slot, or that is to find what is restored; others find the slot empty.
    max_tokens: saved at most; None means all.
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
