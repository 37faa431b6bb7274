"""The numbers behind the metrics: what was seen of requests, and what engines last said of themselves."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from octavo.core.client import EngineStatus, ModelInfo
from octavo.engine.metrics import Histogram

CancelPhase: TypeAlias = Literal["prefill", "decode"]
CANCEL_PHASES: tuple[CancelPhase, ...] = ("prefill", "decode")  # prefill: before the first token, in the queue or not
FINISHED_REASONS = ("stop", "length", "abort", "error")
UNKNOWN = "other"
REJECTED_REASONS = (
    "server_overloaded",
    "queue_timeout",
    "server_shutting_down",
    "engine_restarting",
    "engine_stalled",
    "model_loading",
    "invalid_request",
    UNKNOWN,
)
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

# The upper ends that dashboards made for vLLM know, and finer ones where small models on a CPU live.
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
# fmt: on


def _first_token_times() -> Histogram:
    return Histogram(FIRST_TOKEN_BUCKETS_S)


def _token_times() -> Histogram:
    return Histogram(TOKEN_BUCKETS_S)


def _request_times() -> Histogram:
    return Histogram(REQUEST_BUCKETS_S)


def _token_counts() -> Histogram:
    return Histogram(TOKEN_COUNT_BUCKETS)


def _choice_counts() -> Histogram:
    return Histogram(CHOICE_BUCKETS)


def _preemption_counts() -> Histogram:
    return Histogram(PREEMPTION_BUCKETS)


@dataclass(slots=True)
class ModelStats:
    """All that was seen of one model's requests since the server's start. Times in seconds."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_embedding: int = 0  # texts that the engine has now
    num_corrupted: int = 0  # ended because the model computed a value that is no number
    finished: Counter[str] = field(default_factory=Counter)  # by FINISHED_REASONS, one a choice
    cancelled: Counter[str] = field(default_factory=Counter)  # by CANCEL_PHASES, one a request
    time_to_first_token: Histogram = field(default_factory=_first_token_times)
    inter_token_latency: Histogram = field(default_factory=_token_times)
    time_per_output_token: Histogram = field(default_factory=_token_times)  # one a request: its mean
    e2e_latency: Histogram = field(default_factory=_request_times)
    queue_time: Histogram = field(default_factory=_request_times)
    prefill_time: Histogram = field(default_factory=_request_times)
    decode_time: Histogram = field(default_factory=_request_times)
    inference_time: Histogram = field(default_factory=_request_times)
    prompt_lengths: Histogram = field(default_factory=_token_counts)
    computed_lengths: Histogram = field(default_factory=_token_counts)  # of prompts, without what was in the cache
    preemptions: Histogram = field(default_factory=_preemption_counts)
    answer_lengths: Histogram = field(default_factory=_token_counts)
    longest_choices: Histogram = field(default_factory=_token_counts)
    params_n: Histogram = field(default_factory=_choice_counts)
    params_max_tokens: Histogram = field(default_factory=_token_counts)


@dataclass(slots=True)
class EngineCounter:
    """A number of the engine that starts again at 0 with each of its processes, as one that never falls."""

    ended: float = 0.0  # what the processes before this one had counted
    current: float = 0.0

    @property
    def value(self) -> float:
        return self.ended + self.current

    def update(self, value: float, *, is_new_process: bool = False) -> None:
        if is_new_process or value < self.current:
            self.ended += self.current
        self.current = value


@dataclass(slots=True)
class EngineFigures:
    """What one engine last said of itself. status: None when its model is unloaded."""

    status: EngineStatus | None
    info: ModelInfo | None = None  # None: it was never ready
    num_embedding: int = 0  # texts; its status speaks of sequences that are generated
    resident_bytes: int = 0  # of its process
    grammar_cache_bytes: int = 0
    restarts: EngineCounter = field(default_factory=EngineCounter)
    preemptions: EngineCounter = field(default_factory=EngineCounter)
    evictions: EngineCounter = field(default_factory=EngineCounter)
    steps: EngineCounter = field(default_factory=EngineCounter)
    step_token_bounds: Sequence[float] = ()
    step_token_counts: list[EngineCounter] = field(default_factory=list)  # steps by their number of tokens
    step_token_sum: EngineCounter = field(default_factory=EngineCounter)
    process: tuple[int | None, int] | None = None  # whose numbers these are: process id, number of restarts

    @property
    def num_running(self) -> int:
        """Sequences and texts that are being computed. Of texts as many as have seats; see `PoolingQueue`."""
        return (self.status.num_running if self.status is not None else 0) + self._num_seated_texts

    @property
    def num_waiting(self) -> int:
        num_texts = self.num_embedding - self._num_seated_texts
        return (self.status.num_waiting if self.status is not None else 0) + num_texts

    @property
    def _num_seated_texts(self) -> int:
        return min(self.num_embedding, self.info.max_num_seqs if self.info is not None else 0)

    def saw_status(self, status: EngineStatus, resident_bytes: int, num_embedding: int) -> None:
        self.status = status
        self.resident_bytes = resident_bytes
        self.num_embedding = num_embedding
        self.restarts.update(status.num_restarts)

    def saw_numbers(self, numbers: Mapping[str, object]) -> None:
        """numbers: of `EngineClient.metrics`; what is not in it stays as it was."""
        status = self.status
        process = (status.pid, status.num_restarts) if status is not None else None
        is_new = process != self.process
        self.process = process
        counters = {
            "num_preemptions_total": self.preemptions,
            "num_evictions_total": self.evictions,
            "num_steps_total": self.steps,
        }
        for name, counter in counters.items():
            counter.update(_number(numbers.get(name)), is_new_process=is_new)
        self.grammar_cache_bytes = int(_number(numbers.get("grammar_cache_bytes")))
        steps = numbers.get("batched_tokens")
        if isinstance(steps, Mapping):
            self._saw_steps(steps, is_new)

    def _saw_steps(self, steps: Mapping[str, object], is_new: bool) -> None:
        bounds, counts = steps.get("bounds"), steps.get("counts")
        if not isinstance(bounds, (list, tuple)) or not isinstance(counts, (list, tuple)):
            return
        self.step_token_bounds = bounds
        self.step_token_counts.extend(EngineCounter() for _ in range(len(counts) - len(self.step_token_counts)))
        for counter, count in zip(self.step_token_counts, counts, strict=False):
            counter.update(_number(count), is_new_process=is_new)
        self.step_token_sum.update(_number(steps.get("total")), is_new_process=is_new)

    def left(self) -> None:
        """The model was unloaded: its counters stay, its gauges go."""
        self.status = None
        self.resident_bytes = 0
        self.grammar_cache_bytes = 0
        self.num_embedding = 0


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def resident_bytes(pid: int | None) -> int:
    """Physical memory of a process (Linux, proc(5)); 0 if it is gone or unknown."""
    if pid is None:
        return 0
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
