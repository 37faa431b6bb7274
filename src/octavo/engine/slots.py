"""Actions on slots and their reports. Slots are llama.cpp's numbered places for the last prompts and answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class SlotAction:
    """Saves a slot's content to a file, restores it, or erases it.

    salt: salt of the request that filled the slot, or of the requests that may use the restored content. To requests
    with another salt, the slot is empty.
    max_tokens: most tokens to save, or None for no limit.
    """

    kind: Literal["save", "restore", "erase"]
    slot: int
    path: str = ""
    salt: str = ""
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class SlotReport:
    """The number of tokens whose keys and values were saved, restored or erased, the size of the file, and the time."""

    num_tokens: int
    num_bytes: int = 0
    seconds: float = 0.0
