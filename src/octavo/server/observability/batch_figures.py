"""The figures of a server's batches, beside those of live requests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

LINE_RESULTS = ("completed", "failed")
BATCH_ENDS = ("completed", "failed", "expired", "cancelled")
TOKEN_KINDS = ("input_tokens", "output_tokens", "cached_tokens", "reasoning_tokens")


@dataclass(slots=True)
class BatchFigures:
    """Counts since the start of the server, and what runs now.

    ended: batches by status. lines: by result. tokens: of answers, by their names in the usage of a batch.
    num_batches: those that have not ended. num_running: of these, those whose lines run. num_running_lines: lines that
    are being answered or wait for a row.
    """

    ended: Counter[str] = field(default_factory=Counter)
    lines: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    num_batches: int = 0
    num_running: int = 0
    num_running_lines: int = 0
