"""The time that one batch of requests takes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from octavo.bench.load import check_sizes, run_once
from octavo.bench.machine import Machine, describe_machine
from octavo.bench.statistics import Spread
from octavo.config import EngineConfig
from octavo.engine.session import Session


@dataclass(frozen=True, slots=True)
class LatencyReport:
    """Figures as `octavo.bench.DEFINITIONS` defines them; `dataclasses.asdict` makes it JSON."""

    machine: Machine
    input_len: int
    output_len: int
    batch_size: int
    iterations: int
    time_to_first_token_s: Spread
    time_per_output_token_s: Spread | None  # None with a single output token
    end_to_end_s: Spread
    prompt_tokens_per_s: Spread
    output_tokens_per_s: Spread


def latency(
    model: str = "smollm2",
    input_len: int = 32,
    output_len: int = 128,
    batch_size: int = 1,
    iterations: int = 10,
    *,
    warmup: int = 1,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> LatencyReport:
    """Runs `iterations` batches of batch_size equal requests, after `warmup` batches that do not count.

    options: further fields of `octavo.config.EngineConfig`. progress: called with (runs done, runs in all).
    Raises UsageError, ModelLoadError or InsufficientMemoryError.
    """
    check_sizes(input_len=input_len, output_len=output_len, batch_size=batch_size, iterations=iterations)
    rng = random.Random(0)
    # The whole batch runs at once, however large it is.
    room = {name: max(batch_size, getattr(EngineConfig, name)) for name in ("max_num_seqs", "max_num_batched_tokens")}
    session = Session(EngineConfig.resolve(model, {**room, **options}))
    try:
        runs = []
        for i in range(warmup + iterations):
            runs.append(run_once(session, batch_size, input_len, output_len, rng))
            if progress is not None:
                progress(i + 1, warmup + iterations)
        runs = runs[warmup:]
        per_token = [value for run in runs for value in run.time_per_output_tokens_s]
        return LatencyReport(
            machine=describe_machine(session),
            input_len=input_len,
            output_len=output_len,
            batch_size=batch_size,
            iterations=iterations,
            time_to_first_token_s=Spread.of([value for run in runs for value in run.time_to_first_tokens_s]),
            time_per_output_token_s=Spread.of(per_token) if per_token else None,
            end_to_end_s=Spread.of([run.end_to_end_s for run in runs]),
            prompt_tokens_per_s=Spread.of([batch_size * input_len / max(run.time_to_first_tokens_s) for run in runs]),
            output_tokens_per_s=Spread.of([batch_size * output_len / run.end_to_end_s for run in runs]),
        )
    finally:
        session.close()
