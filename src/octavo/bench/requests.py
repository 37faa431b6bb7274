"""Measures the latency of one batch of requests, and the throughput of many requests submitted at once."""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from octavo.bench.machine import Machine, describe_machine
from octavo.config import EngineConfig
from octavo.engine.loading.progress_bar import ProgressBar
from octavo.engine.session import Session
from octavo.errors import OctavoError, UsageError
from octavo.generation_request import RequestOptions
from octavo.outputs import OutputDelta, RequestMetrics
from octavo.sampling_params import RequestOutputKind, SamplingParams

DEFINITIONS = {
    "time_to_first_token_s": "from submitting a request to its first token, in seconds; one per request",
    "time_per_output_token_s": "from a request's first token to its last, divided by the tokens after the first",
    "end_to_end_s": "from submitting the first request to the last token of all requests, in seconds; one per run",
    "prompt_tokens_per_s": "prompt tokens of all requests, divided by the time until all have their first token",
    "output_tokens_per_s": "generated tokens of all requests, divided by end_to_end_s",
    "total_tokens_per_s": "prompt and generated tokens of all requests, divided by end_to_end_s",
    "requests_per_s": "requests, divided by end_to_end_s",
    "kv_waste": "share of the allocated cache slots that held no token, averaged over all steps",
    "guessed_share": "share of the generated tokens that were drafted correctly and computed in a step with others",
    "spread": "the median; low and high are the 10th and 90th percentile, which enclose the middle 80 % of the values",
    "load": "random token ids, different for each request, so that no prefix is cached; every request generates "
    "exactly output_len tokens greedily; all requests of a run are submitted at once; warm-up runs do not count",
}


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with the 10th and 90th percentiles."""

    median: float
    low: float
    high: float
    num_values: int

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Compute the spread of at least one value; percentiles are interpolated between neighbours."""
        median, low, high = np.percentile(values, (50, 10, 90)).tolist()
        return Spread(median, low, high, len(values))


@dataclass(frozen=True, slots=True)
class LatencyReport:
    """Latency figures, as defined in `DEFINITIONS`. `dataclasses.asdict` turns them into JSON-compatible data."""

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
    guessed_share: float


@dataclass(frozen=True, slots=True)
class ThroughputReport:
    """Throughput figures, as defined in `DEFINITIONS`. `dataclasses.asdict` turns them into JSON-compatible data."""

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
    guessed_share: float


def latency(
    model: str = "smollm2",
    input_len: int = 32,
    output_len: int = 128,
    batch_size: int = 1,
    iterations: int = 10,
    *,
    warmup: int = 1,
    show_progress: bool = False,
    **options: Any,
) -> LatencyReport:
    """Run `iterations` batches of batch_size identical requests, after `warmup` batches that are not measured.

    show_progress: show a bar on a terminal.
    options: additional fields of `octavo.config.EngineConfig`.

    Raises UsageError, ModelLoadError or InsufficientMemoryError.
    """
    check_sizes(input_len=input_len, output_len=output_len, batch_size=batch_size, iterations=iterations)
    # The whole batch runs at once, however large it is.
    room = {"max_num_seqs": max(batch_size, EngineConfig.max_num_seqs)}
    counts = [batch_size] * (warmup + iterations)
    result = _measure(model, {**room, **options}, counts, warmup, input_len, output_len, show_progress)
    times = result.times
    return LatencyReport(
        machine=result.machine,
        input_len=input_len,
        output_len=output_len,
        batch_size=batch_size,
        iterations=iterations,
        time_to_first_token_s=result.time_to_first_token_s,
        time_per_output_token_s=result.time_per_output_token_s,
        end_to_end_s=Spread.of(times),
        prompt_tokens_per_s=Spread.of([batch_size * input_len / max(run.first_tokens_s) for run in result.runs]),
        output_tokens_per_s=Spread.of([batch_size * output_len / time for time in times]),
        guessed_share=result.guessed_share,
    )


def throughput(
    model: str = "smollm2",
    num_prompts: int = 64,
    input_len: int = 128,
    output_len: int = 128,
    *,
    iterations: int = 3,
    warmup: int = 1,
    show_progress: bool = False,
    **options: Any,
) -> ThroughputReport:
    """Submit num_prompts requests at once and wait for all, `iterations` times after `warmup` unmeasured runs.

    show_progress: show a bar on a terminal.
    options: additional fields of `octavo.config.EngineConfig`.

    Raises UsageError, ModelLoadError or InsufficientMemoryError.
    """
    check_sizes(num_prompts=num_prompts, input_len=input_len, output_len=output_len, iterations=iterations)
    # A short run warms up caches and clocks as well as a long one.
    counts = [min(num_prompts, 8)] * warmup + [num_prompts] * iterations
    result = _measure(model, options, counts, warmup, input_len, output_len, show_progress)
    times = result.times
    return ThroughputReport(
        machine=result.machine,
        num_prompts=num_prompts,
        input_len=input_len,
        output_len=output_len,
        iterations=iterations,
        end_to_end_s=Spread.of(times),
        requests_per_s=Spread.of([num_prompts / time for time in times]),
        output_tokens_per_s=Spread.of([num_prompts * output_len / time for time in times]),
        total_tokens_per_s=Spread.of([num_prompts * (input_len + output_len) / time for time in times]),
        time_to_first_token_s=result.time_to_first_token_s,
        time_per_output_token_s=result.time_per_output_token_s,
        kv_waste=result.kv_waste,
        num_preemptions=result.num_preemptions,
        guessed_share=result.guessed_share,
    )


@dataclass(frozen=True, slots=True)
class Run:
    """One run: its wall time in seconds, and the engine's metrics for each request."""

    end_to_end_s: float
    requests: list[RequestMetrics]

    @property
    def first_tokens_s(self) -> list[float]:
        """Time to the first token of each request, in seconds."""
        return [metrics.time_to_first_token_s or 0.0 for metrics in self.requests]


@dataclass(frozen=True, slots=True)
class _Result:
    """The measured runs. Its properties are spreads and lists over all of them, in seconds."""

    machine: Machine
    runs: list[Run]
    kv_waste: float
    num_preemptions: int

    @property
    def times(self) -> list[float]:
        return [run.end_to_end_s for run in self.runs]

    @property
    def guessed_share(self) -> float:
        """Fraction of generated tokens that came from accepted drafts."""
        metrics = [each for run in self.runs for each in run.requests]
        right = sum(each.num_accepted_draft_tokens for each in metrics)
        return right / max(sum(each.num_generated_tokens for each in metrics), 1)

    @property
    def time_to_first_token_s(self) -> Spread:
        return Spread.of([seconds for run in self.runs for seconds in run.first_tokens_s])

    @property
    def time_per_output_token_s(self) -> Spread | None:
        requests = [metrics for run in self.runs for metrics in run.requests if metrics.num_generated_tokens > 1]
        return Spread.of([m.decode_s / (m.num_generated_tokens - 1) for m in requests]) if requests else None


def check_sizes(**sizes: int) -> None:
    """Check that all sizes are positive integers. Raises UsageError naming the first that is not."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{name} is {value!r}; it must be an integer of at least 1")


def _measure(
    model: str,
    options: dict[str, Any],
    counts: Sequence[int],
    warmup: int,
    input_len: int,
    output_len: int,
    show_progress: bool,
) -> _Result:
    """Load the model and do one run for each number of requests in `counts`. The first `warmup` are not measured."""
    rng = random.Random(0)
    runs: list[Run] = []
    with (
        closing(Session(EngineConfig.resolve(model, options))) as session,
        ProgressBar(enabled=show_progress) as bar,
    ):
        before = replace(session.metrics)
        bar.update("runs", 0, len(counts))
        for i, count in enumerate(counts):
            runs.append(run_once(session, count, input_len, output_len, rng))
            bar.update("runs", i + 1, len(counts))
            if i < warmup:
                before = replace(session.metrics)
        return _Result(
            describe_machine(session),
            runs[warmup:],
            session.metrics.kv_waste_since(before),
            session.metrics.num_preemptions_total - before.num_preemptions_total,
        )


def run_once(session: Session, num_requests: int, input_len: int, output_len: int, rng: random.Random) -> Run:
    """Submit random prompts of input_len tokens and wait for output_len tokens from each.

    Raises UsageError if they are too long for the context.
    """
    if input_len + output_len > session.max_model_len:
        raise UsageError(
            f"input_len {input_len} and output_len {output_len} add up to {input_len + output_len} tokens; "
            f"the context has {session.max_model_len}"
        )
    params = SamplingParams(
        temperature=0.0,
        max_tokens=output_len,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    num_tokens = session.tokenizer.vocab_size
    prompts = [[rng.randrange(num_tokens) for _ in range(input_len)] for _ in range(num_requests)]
    results: queue.SimpleQueue[OutputDelta | OctavoError] = queue.SimpleQueue()
    start = time.perf_counter()
    for prompt in prompts:
        session.submit(session.create_request(prompt, params, options=RequestOptions()), results.put)
    outputs = []
    for _ in prompts:
        item = results.get()
        if isinstance(item, OctavoError):
            raise item
        outputs.append(item)
    return Run(time.perf_counter() - start, [output.metrics for output in outputs if output.metrics is not None])
