"""The throughput of a model under full load."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from octavo.bench.load import check_sizes, run_once
from octavo.bench.machine import Machine, describe_machine
from octavo.bench.statistics import Spread
from octavo.config import EngineConfig
from octavo.engine.session import Session


@dataclass(frozen=True, slots=True)
class ThroughputReport:
    """Figures as `octavo.bench.DEFINITIONS` defines them; `dataclasses.asdict` makes it JSON."""

    machine: Machine
    num_prompts: int
    input_len: int
    output_len: int
    iterations: int
    end_to_end_s: Spread
    requests_per_s: Spread
    output_tokens_per_s: Spread
    total_tokens_per_s: Spread
    time_to_first_token_s: Spread
    time_per_output_token_s: Spread | None  # None with a single output token
    kv_waste: float
    num_preemptions: int


def throughput(
    model: str = "smollm2",
    num_prompts: int = 64,
    input_len: int = 128,
    output_len: int = 128,
    *,
    iterations: int = 3,
    warmup: int = 1,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> ThroughputReport:
    """Submits num_prompts requests at once and waits for all, `iterations` times after `warmup` runs that do not count.

    options: further fields of `octavo.config.EngineConfig`. progress: called with (runs done, runs in all).
    Raises UsageError, ModelLoadError or InsufficientMemoryError.
    """
    check_sizes(num_prompts=num_prompts, input_len=input_len, output_len=output_len, iterations=iterations)
    rng = random.Random(0)
    session = Session(EngineConfig.resolve(model, options))
    try:
        runs = []
        before = replace(session.metrics)
        for i in range(warmup + iterations):
            # A short run warms up caches and clocks as well as a long one.
            count = min(num_prompts, 8) if i < warmup else num_prompts
            runs.append(run_once(session, count, input_len, output_len, rng))
            if progress is not None:
                progress(i + 1, warmup + iterations)
            if i < warmup:
                before = replace(session.metrics)
        runs = runs[warmup:]
        per_token = [value for run in runs for value in run.time_per_output_tokens_s]
        times = [run.end_to_end_s for run in runs]
        return ThroughputReport(
            machine=describe_machine(session),
            num_prompts=num_prompts,
            input_len=input_len,
            output_len=output_len,
            iterations=iterations,
            end_to_end_s=Spread.of(times),
            requests_per_s=Spread.of([num_prompts / time for time in times]),
            output_tokens_per_s=Spread.of([num_prompts * output_len / time for time in times]),
            total_tokens_per_s=Spread.of([num_prompts * (input_len + output_len) / time for time in times]),
            time_to_first_token_s=Spread.of([value for run in runs for value in run.time_to_first_tokens_s]),
            time_per_output_token_s=Spread.of(per_token) if per_token else None,
            kv_waste=session.metrics.kv_waste_since(before),
            num_preemptions=session.metrics.num_preemptions_total - before.num_preemptions_total,
        )
    finally:
        session.close()
