"""Medians with their spread, and the definition of every figure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

DEFINITIONS = {
    "time_to_first_token_s": "from submitting a request to its first token, in seconds; one per request",
    "time_per_output_token_s": "from a request's first token to its last, divided by the tokens after the first",
    "end_to_end_s": "from submitting the first request to the last token of all requests, in seconds; one per run",
    "prompt_tokens_per_s": "prompt tokens of all requests, divided by the time until all have their first token",
    "output_tokens_per_s": "generated tokens of all requests, divided by end_to_end_s",
    "total_tokens_per_s": "prompt and generated tokens of all requests, divided by end_to_end_s",
    "requests_per_s": "requests, divided by end_to_end_s",
    "kv_waste": "share of the allocated cache slots that held no token, averaged over all steps",
    "spread": "the median; low and high are the 10th and 90th percentile, which enclose the middle 80 % of the values",
    "load": "random token ids, different for each request, so that no prefix is cached; every request generates "
    "exactly output_len tokens greedily; all requests of a run are submitted at once; warm-up runs do not count",
}


@dataclass(frozen=True, slots=True)
class Spread:
    """A median, and the 10th and 90th percentile around it."""

    median: float
    low: float
    high: float
    num_values: int

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """The spread of at least one value; percentiles are interpolated between neighbours."""
        ordered = sorted(values)
        return Spread(statistics.median(ordered), _percentile(ordered, 0.1), _percentile(ordered, 0.9), len(ordered))


def _percentile(ordered: Sequence[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
