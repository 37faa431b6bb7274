"""The engine's counters and histograms. Reading them is cheap; other modules export them."""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.engine.request import Request

# Upper ends of buckets: those used by vLLM's dashboards, and finer ones for small models on a CPU.
# fmt: off
FIRST_TOKEN_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)
TOKEN_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
REQUEST_BUCKETS_S = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
    60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)
TOKEN_COUNT_BUCKETS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000, 1000000,
)
CHOICE_BUCKETS = (1, 2, 5, 10, 20, 50, 100)
PREEMPTION_BUCKETS = (1, 2, 3, 4, 5, 10, 20)
STEP_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
# fmt: on


@dataclass(slots=True)
class Histogram:
    """Counts of observations per bucket.

    bounds: inclusive upper bounds, ascending.
    counts: one per bound, and one for larger values.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def plus(self, other: Histogram) -> Histogram:
        """Return the sum of both histograms, which must have the same bounds."""
        counts = [first + second for first, second in zip(self.counts, other.counts, strict=True)]
        return Histogram(self.bounds, counts, self.total + other.total)


@dataclass(slots=True)
class EngineMetrics:
    """Counters since the start (`num_*_total`), histograms, and the state after the last step or request."""

    num_requests_total: int = 0
    num_finished_total: dict[str, int] = field(default_factory=dict)  # by finish reason, one per choice
    num_prompt_tokens_total: int = 0
    num_cached_tokens_total: int = 0
    num_generated_tokens_total: int = 0
    num_steps_total: int = 0
    num_preemptions_total: int = 0
    num_evictions_total: int = 0
    num_items_encoded_total: int = 0  # images and sources that went through an encoder
    encoder_s_total: float = 0.0  # time of the encoder
    num_corrupted_total: int = 0  # requests whose logits were not numbers
    num_drafts_total: int = 0  # how often a sequence had drafts in a step
    num_draft_tokens_total: dict[str, int] = field(default_factory=dict)  # by source
    num_accepted_draft_tokens_total: dict[str, int] = field(default_factory=dict)  # the right ones among these
    num_accepted_by_position_total: dict[str, int] = field(default_factory=dict)  # by position among the drafts
    # Tokens looked up and found in the prefix cache at admission, again after each preemption.
    num_prefix_queries_total: int = 0
    num_prefix_hits_total: int = 0
    # Of a store beyond the cache: tokens missing in the cache, and how many of them were loaded; bytes written
    # and read; damaged records, which are dropped.
    num_store_queries_total: int = 0
    num_store_hits_total: int = 0
    num_store_bytes_written_total: int = 0
    num_store_bytes_read_total: int = 0
    num_store_records_dropped_total: int = 0
    # Of each finished request: its time by phase, and its size.
    queue_s: Histogram = field(default_factory=partial(Histogram, REQUEST_BUCKETS_S))
    prefill_s: Histogram = field(default_factory=partial(Histogram, REQUEST_BUCKETS_S))
    decode_s: Histogram = field(default_factory=partial(Histogram, REQUEST_BUCKETS_S))
    inference_s: Histogram = field(default_factory=partial(Histogram, REQUEST_BUCKETS_S))  # prefill and decode
    e2e_s: Histogram = field(default_factory=partial(Histogram, REQUEST_BUCKETS_S))
    time_to_first_token_s: Histogram = field(default_factory=partial(Histogram, FIRST_TOKEN_BUCKETS_S))
    time_per_output_token_s: Histogram = field(default_factory=partial(Histogram, TOKEN_BUCKETS_S))
    prompt_tokens: Histogram = field(default_factory=partial(Histogram, TOKEN_COUNT_BUCKETS))
    generated_tokens: Histogram = field(default_factory=partial(Histogram, TOKEN_COUNT_BUCKETS))  # over all choices
    computed_tokens: Histogram = field(default_factory=partial(Histogram, TOKEN_COUNT_BUCKETS))  # prompt tokens
    longest_choice: Histogram = field(default_factory=partial(Histogram, TOKEN_COUNT_BUCKETS))  # generated tokens
    preemptions: Histogram = field(default_factory=partial(Histogram, PREEMPTION_BUCKETS))
    params_n: Histogram = field(default_factory=partial(Histogram, CHOICE_BUCKETS))
    params_max_tokens: Histogram = field(default_factory=partial(Histogram, TOKEN_COUNT_BUCKETS))  # if given
    inter_token_s: Histogram = field(default_factory=partial(Histogram, TOKEN_BUCKETS_S))  # from token to token
    step_s: Histogram = field(default_factory=partial(Histogram, TOKEN_BUCKETS_S))
    batched_tokens: Histogram = field(default_factory=partial(Histogram, STEP_BUCKETS))
    num_running: int = 0
    num_waiting: int = 0
    num_embedding: int = 0  # texts being embedded or scored, not counted as running
    num_embedding_waiting: int = 0
    num_lost_draft_models: int = 0  # disabled because they failed
    num_blocks: int = 0
    num_used_blocks: int = 0
    grammar_cache_bytes: int = 0
    # The waste of paging: slots without a token, over all slots of blocks in use.
    num_allocated_slots_total: int = 0
    num_wasted_slots_total: int = 0

    def observe_request(self, request: Request) -> None:
        """Count a request after its last output, whether it was answered, aborted or failed."""
        times, measured = request.times, request.metrics
        if not request.is_measured or measured is None:
            return
        now = time.perf_counter()
        self.num_generated_tokens_total += request.num_generated_tokens
        self.num_cached_tokens_total += request.num_cached_tokens
        self.e2e_s.observe(now - times.arrival)
        self.prompt_tokens.observe(request.num_given_tokens)
        self.generated_tokens.observe(request.num_generated_tokens)
        self.computed_tokens.observe(request.num_given_tokens - request.num_cached_tokens)
        self.longest_choice.observe(max([sequence.num_output_tokens for sequence in request.sequences], default=0))
        self.preemptions.observe(request.num_preemptions)
        self.params_n.observe(request.params.num_choices)
        if request.params.max_tokens is not None:
            self.params_max_tokens.observe(request.params.max_tokens)
        if times.scheduled:
            self.queue_s.observe(measured.queue_s)
            self.prefill_s.observe((times.first_token or now) - times.scheduled)
            self.inference_s.observe((times.last_token or now) - times.scheduled)
        if measured.time_to_first_token_s is not None:
            self.time_to_first_token_s.observe(measured.time_to_first_token_s)
            self.decode_s.observe(measured.decode_s)
        steps_after_first = request.num_generated_tokens / sum(len(group.members) for group in request.groups) - 1
        if steps_after_first > 0:
            self.time_per_output_token_s.observe(measured.decode_s / steps_after_first)

    def kv_waste_since(self, before: EngineMetrics) -> float:
        """Return the share of the allocated cache slots that held no token since `before`, a copy of these metrics."""
        allocated = self.num_allocated_slots_total - before.num_allocated_slots_total
        return (self.num_wasted_slots_total - before.num_wasted_slots_total) / max(allocated, 1)

    def plus(self, other: EngineMetrics) -> EngineMetrics:
        """Return the sum of the counts and states of two engines."""
        sums: dict[str, Any] = {}
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if isinstance(mine, Histogram):
                sums[item.name] = theirs.plus(mine)
            elif isinstance(mine, dict):
                sums[item.name] = {key: mine.get(key, 0) + theirs.get(key, 0) for key in mine.keys() | theirs.keys()}
            else:
                sums[item.name] = mine + theirs
        return EngineMetrics(**sums)

    def after(self, before: EngineMetrics) -> EngineMetrics:
        """Return the sum of these counts and an earlier engine's counts, together with this engine's state."""
        names = [item.name for item in fields(self) if not item.name.endswith("_total")]
        state: dict[str, Any] = {name: value for name in names if isinstance(value := getattr(self, name), int)}
        return replace(self.plus(before), **state)
