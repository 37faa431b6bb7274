"""Medians with their spread, and what each figure means."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

DEFINITIONS = {
    "time_to_first_token_s": "from handing a request in to its first token, in seconds; one value a request",
    "time_per_output_token_s": "from a request's first token to its last, divided by the tokens after the first",
    "end_to_end_s": "from handing the first request in to the last token of the last, in seconds; one value a run",
    "prompt_tokens_per_s": "prompt tokens of all requests, divided by the time to the last of the first tokens",
    "output_tokens_per_s": "generated tokens of all requests, divided by end_to_end_s",
    "total_tokens_per_s": "prompt and generated tokens of all requests, divided by end_to_end_s",
    "requests_per_s": "requests, divided by end_to_end_s",
    "kv_waste": "share of the allocated cache slots that held no token, averaged over all steps",
    "spread": "median, and between low and high the middle 80 % of the values (10th to 90th percentile)",
    "load": "random token ids, different for each request, so that no prefix is cached; every request generates "
    "exactly output_len tokens, greedily; all requests of a run are handed in at once; warm-up runs are not counted",
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
        """Of at least one value; percentiles are interpolated between neighbours."""
        ordered = sorted(values)
        return Spread(statistics.median(ordered), _percentile(ordered, 0.1), _percentile(ordered, 0.9), len(ordered))


def _percentile(ordered: Sequence[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
