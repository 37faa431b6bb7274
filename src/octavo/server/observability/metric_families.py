"""The exposition: every metric's name, meaning and labels in one table (Prometheus text format, OpenMetrics).

Names, labels and units are those of vLLM if it has the same metric, so that its dashboards and autoscalers work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import TypeAlias, TypeVar

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from octavo.core.client import EngineState, ModelInfo
from octavo.engine.metrics import EngineMetrics, Histogram
from octavo.server.observability.metric_values import (
    CANCEL_PHASES,
    FINISHED_REASONS,
    REJECTED_REASONS,
    EngineFigures,
    ModelStats,
)

_MODEL_LABELS = ("model_name", "engine")
_ENGINE = "0"  # vLLM numbers the replicas of a model; there is one here


T = TypeVar("T")
# Name, meaning, labels, and the values by those labels.
_Row: TypeAlias = tuple[str, str, tuple[str, ...], Callable[[T], dict[tuple[str, ...], float]]]
_MODEL_COUNTERS: tuple[tuple[str, str, Callable[[ModelStats], float]], ...] = (
    ("prompt_tokens", "Prompt tokens of requests that got their first token.", lambda s: s.num_prompt_tokens),
    ("prompt_tokens_cached", "Of these, tokens found in the prefix cache.", lambda s: s.num_cached_tokens),
    ("generation_tokens", "Generated tokens.", lambda s: s.num_generated_tokens),
    ("prefix_cache_queries", "Tokens looked up in the prefix cache.", lambda s: s.num_prompt_tokens),
    ("prefix_cache_hits", "Tokens found in the prefix cache.", lambda s: s.num_cached_tokens),
    ("corrupted_requests", "Requests that ended because of a NaN or infinity.", lambda s: s.num_corrupted),
)
_HISTOGRAMS: tuple[tuple[str, str, Callable[[EngineMetrics], Histogram]], ...] = (
    ("time_to_first_token_seconds", "From the request to its first token.", lambda m: m.time_to_first_token_s),
    ("inter_token_latency_seconds", "Between two tokens of one choice.", lambda m: m.inter_token_s),
    (
        "time_per_output_token_seconds",
        "The older name of inter_token_latency_seconds, for dashboards that use it.",
        lambda m: m.inter_token_s,
    ),
    (
        "request_time_per_output_token_seconds",
        "A request's mean time per token after the first.",
        lambda m: m.time_per_output_token_s,
    ),
    ("e2e_request_latency_seconds", "From the request to its last token.", lambda m: m.e2e_s),
    ("request_queue_time_seconds", "Waiting for the engine to begin.", lambda m: m.queue_s),
    ("request_prefill_time_seconds", "Computing the prompt.", lambda m: m.prefill_s),
    ("request_decode_time_seconds", "From the first token to the last.", lambda m: m.decode_s),
    ("request_inference_time_seconds", "Prefill and decode together.", lambda m: m.inference_s),
    ("request_prompt_tokens", "Prompt tokens of a finished request.", lambda m: m.prompt_tokens),
    (
        "request_prefill_kv_computed_tokens",
        "Prompt tokens of a finished request that were not in the prefix cache.",
        lambda m: m.computed_tokens,
    ),
    ("request_num_preemptions", "Times that a finished request gave its KV blocks to others.", lambda m: m.preemptions),
    ("request_generation_tokens", "Generated tokens of a finished request, all choices.", lambda m: m.generated_tokens),
    ("request_max_num_generation_tokens", "Tokens of a request's longest choice.", lambda m: m.longest_choice),
    ("request_params_n", "The parameter n.", lambda m: m.params_n),
    ("request_params_max_tokens", "The parameter max_tokens.", lambda m: m.params_max_tokens),
    ("iteration_tokens_total", "Tokens computed in one step of the engine.", lambda m: m.batched_tokens),
)


def _kv_usage(figures: EngineFigures) -> float:
    return figures.current.num_used_blocks / max(figures.current.num_blocks, 1)


# With vLLM's labels. Only a lack of seats or blocks makes a sequence wait here, and the tokens of a prompt are computed
# or in the cache of the same engine.
_LABELLED_COUNTERS: tuple[_Row[ModelStats], ...] = (
    (
        "prompt_tokens_by_source",
        "Prompt tokens by where they came from.",
        ("source",),
        lambda s: {
            ("local_compute",): s.num_prompt_tokens - s.num_cached_tokens,
            ("local_cache_hit",): s.num_cached_tokens,
            ("external_kv_transfer",): 0,
        },
    ),
    (
        "request_success",
        "Finished choices.",
        ("finished_reason",),
        lambda s: {(reason,): s.finished[reason] for reason in FINISHED_REASONS},
    ),
    (
        "requests_cancelled",
        "Requests that were cancelled.",
        ("phase",),
        lambda s: {(phase,): s.cancelled[phase] for phase in CANCEL_PHASES},
    ),
)
_LABELLED_GAUGES: tuple[_Row[EngineFigures], ...] = (
    (
        "num_requests_waiting_by_reason",
        "Why sequences wait.",
        ("reason",),
        lambda f: {("capacity",): f.num_waiting, ("deferred",): 0},
    ),
    (
        "engine_state",
        "1 for the state that the engine is in.",
        ("state",),
        lambda f: {(state.value,): f.status is not None and f.status.state is state for state in EngineState},
    ),
    (
        "cache_config_info",
        "Always 1; the labels say the KV cache's layout.",
        ("block_size", "num_gpu_blocks", "cache_dtype", "kv_bytes_per_token", "max_model_len", "max_num_seqs"),
        lambda f: {_cache_layout(f.info): 1} if f.info is not None else {},
    ),
)
_ENGINE_COUNTERS: tuple[tuple[str, str, Callable[[EngineFigures], float]], ...] = (
    (
        "num_preemptions",
        "Sequences that had to give their KV blocks to others.",
        lambda f: f.totals.num_preemptions_total,
    ),
    ("kv_block_evictions", "Cached KV blocks that were overwritten.", lambda f: f.totals.num_evictions_total),
    ("engine_steps", "Steps of the engine.", lambda f: f.totals.num_steps_total),
    ("engine_restarts", "Times that the engine's process was started again.", lambda f: f.num_restarts),
)
_ENGINE_GAUGES: tuple[tuple[str, str, Callable[[EngineFigures], float]], ...] = (
    ("kv_cache_usage_perc", "KV cache blocks in use, 0 to 1.", _kv_usage),
    ("gpu_cache_usage_perc", "The older name of kv_cache_usage_perc, for dashboards that use it.", _kv_usage),
    ("engine_load_progress", "How much of the model is loaded, 0 to 1.", lambda f: f.load_progress),
    ("num_requests_running", "Sequences and texts to embed that are being computed.", lambda f: f.num_running),
    ("num_requests_waiting", "Sequences and texts to embed that wait for a place.", lambda f: f.num_waiting),
    ("engine_resident_memory_bytes", "Physical memory of the engine's process.", lambda f: f.resident_bytes),
    ("grammar_cache_bytes", "Memory of compiled grammars.", lambda f: f.current.grammar_cache_bytes),
)


def collect(
    prefix: str,
    models: dict[str, ModelStats],
    engines: dict[str, EngineFigures],
    rejected: Mapping[str, int],
    http: Mapping[tuple[str, str, int], int],
) -> Iterator[Metric]:
    """All metrics, one family after the other."""
    yield from _families(CounterMetricFamily, prefix, _unlabelled(_MODEL_COUNTERS), models)
    yield from _families(CounterMetricFamily, prefix, _LABELLED_COUNTERS, models)
    loaded = {name: figures for name, figures in engines.items() if figures.status is not None}
    yield from _families(GaugeMetricFamily, prefix, _LABELLED_GAUGES, loaded)
    yield from _families(GaugeMetricFamily, prefix, _unlabelled(_ENGINE_GAUGES), loaded)
    yield from _families(CounterMetricFamily, prefix, _unlabelled(_ENGINE_COUNTERS), engines)
    for name, meaning, of_metrics in _HISTOGRAMS:
        family = HistogramMetricFamily(f"{prefix}:{name}", meaning, labels=_MODEL_LABELS)
        for model_name, figures in engines.items():
            seen = of_metrics(figures.totals)
            family.add_metric([model_name, _ENGINE], _buckets(seen.bounds, seen.counts), seen.total)
        yield family
    rejections = CounterMetricFamily(
        f"{prefix}:requests_rejected", "Requests answered with an error instead of a result.", labels=["reason"]
    )
    for reason in REJECTED_REASONS:
        rejections.add_metric([reason], rejected.get(reason, 0))
    yield rejections
    responses = CounterMetricFamily(
        f"{prefix}:http_requests", "HTTP responses by route template.", labels=["route", "method", "status"]
    )
    for (route, method, status), count in http.items():
        responses.add_metric([route, method, str(status)], count)
    yield responses


def _families(
    kind: type[CounterMetricFamily | GaugeMetricFamily], prefix: str, rows: Iterable[_Row[T]], things: Mapping[str, T]
) -> Iterator[Metric]:
    """One family a row, with the values of each thing by its model's name."""
    for name, meaning, labels, values_of in rows:
        family = kind(f"{prefix}:{name}", meaning, labels=[*_MODEL_LABELS, *labels])
        for model_name, thing in things.items():
            for own, value in values_of(thing).items():
                family.add_metric([model_name, _ENGINE, *own], value)
        yield family


def _unlabelled(rows: Iterable[tuple[str, str, Callable[[T], float]]]) -> Iterator[_Row[T]]:
    for name, meaning, value_of in rows:
        yield name, meaning, (), partial(_alone, value_of)


def _alone(value_of: Callable[[T], float], thing: T) -> dict[tuple[str, ...], float]:
    return {(): value_of(thing)}


def _cache_layout(info: ModelInfo) -> tuple[str, ...]:
    sizes = (info.block_size, info.num_blocks, info.kv_dtype, info.kv_bytes_per_token)
    return tuple(map(str, (*sizes, info.max_model_len, info.max_num_seqs)))


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """The cumulative counts by their upper bounds, for the exposition."""
    uppers = [*(repr(float(bound)) for bound in bounds), "+Inf"]
    return [(upper, float(total)) for upper, total in zip(uppers, accumulate(counts), strict=True)]
