"""Figures about the server's batches, separate from those about live requests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

LINE_RESULTS = ("completed", "failed")
BATCH_ENDS = ("completed", "failed", "expired", "cancelled")
TOKEN_KINDS = ("input_tokens", "output_tokens", "cached_tokens", "reasoning_tokens")


@dataclass(slots=True)
class BatchFigures:
    """Counts since the server's start, and the current state.

    ended: number of batches by final status
    lines: number of lines by result
    tokens: number of tokens in answers, by the names in a batch's usage
    num_batches: number of batches that have not ended
    num_running: number of batches whose lines are running
    num_running_lines: number of lines that are being answered or wait for a row
    """

    ended: Counter[str] = field(default_factory=Counter)
    lines: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    num_batches: int = 0
    num_running: int = 0
    num_running_lines: int = 0
