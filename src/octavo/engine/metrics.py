"""What the engine counts about itself. Reading is free; nothing here exports anything."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

# Seconds, about ten a decade: fine enough for percentiles, small enough to keep for ever.
TIME_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 300.0, 600.0),
)
SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class Histogram:
    """Counts of observations by bucket. bounds: inclusive upper ends, ascending; beyond the last is one more."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    @property
    def num_observations(self) -> int:
        return sum(self.counts)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


def _times() -> Histogram:
    return Histogram(TIME_BUCKETS_S)


def _sizes() -> Histogram:
    return Histogram(SIZE_BUCKETS)


@dataclass(slots=True)
class EngineMetrics:
    """Counters since the start (`num_*_total`), histograms, and the state as of the last step or end of a request."""

    num_requests_total: int = 0
    num_finished_total: dict[str, int] = field(default_factory=dict)  # by finish reason, one a choice
    num_prompt_tokens_total: int = 0
    num_cached_tokens_total: int = 0
    num_generated_tokens_total: int = 0
    num_steps_total: int = 0
    num_preemptions_total: int = 0
    num_evictions_total: int = 0
    num_corrupted_total: int = 0  # requests whose logits were no numbers
    # Tokens looked up in the prefix cache when a sequence was admitted, also again after a preemption; and found.
    num_prefix_queries_total: int = 0
    num_prefix_hits_total: int = 0
    # Of each request that has ended: its time by phase, and its size.
    queue_s: Histogram = field(default_factory=_times)
    prefill_s: Histogram = field(default_factory=_times)
    decode_s: Histogram = field(default_factory=_times)
    inference_s: Histogram = field(default_factory=_times)  # prefill and decode
    e2e_s: Histogram = field(default_factory=_times)
    time_to_first_token_s: Histogram = field(default_factory=_times)
    time_per_output_token_s: Histogram = field(default_factory=_times)
    prompt_tokens: Histogram = field(default_factory=_sizes)
    generated_tokens: Histogram = field(default_factory=_sizes)  # over all choices
    params_n: Histogram = field(default_factory=_sizes)
    params_max_tokens: Histogram = field(default_factory=_sizes)  # of those that gave one
    inter_token_s: Histogram = field(default_factory=_times)  # from token to token of a sequence
    step_s: Histogram = field(default_factory=_times)
    batched_tokens: Histogram = field(default_factory=_sizes)
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    grammar_cache_bytes: int = 0
    # Slots of blocks in use that hold no token, over all slots in use: what paging wastes.
    num_allocated_slots_total: int = 0
    num_wasted_slots_total: int = 0

    @property
    def kv_waste(self) -> float:
        """Share of the allocated cache slots that held no token, averaged over all steps."""
        return self.kv_waste_since(EngineMetrics())

    def kv_waste_since(self, before: EngineMetrics) -> float:
        """The same over the steps after `before`, a copy of these metrics."""
        allocated = self.num_allocated_slots_total - before.num_allocated_slots_total
        return (self.num_wasted_slots_total - before.num_wasted_slots_total) / max(allocated, 1)
