"""The exposition: every metric's name, meaning and labels in one table (Prometheus text format, OpenMetrics).

Names, labels and units are those of vLLM if it has the same metric, so that its dashboards and autoscalers work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from octavo.core.client import EngineState
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


_Stat: TypeAlias = Callable[[ModelStats], float]
_MODEL_COUNTERS: tuple[tuple[str, str, _Stat], ...] = (
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


# vLLM's reasons and sources. Here nothing but a lack of seats or blocks makes a sequence wait, and the tokens of a
# prompt are computed or in the cache of the same engine.
_WAITING: tuple[tuple[str, Callable[[EngineFigures], float]], ...] = (
    ("capacity", lambda f: f.num_waiting),
    ("deferred", lambda _: 0),
)
_PROMPT_SOURCES: tuple[tuple[str, _Stat], ...] = (
    ("local_compute", lambda s: s.num_prompt_tokens - s.num_cached_tokens),
    ("local_cache_hit", lambda s: s.num_cached_tokens),
    ("external_kv_transfer", lambda _: 0),
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
    yield from _of_requests(prefix, models)
    yield from _of_engines(prefix, engines)
    yield from _of_responses(prefix, rejected, http)


def _of_responses(
    prefix: str, rejected: Mapping[str, int], http: Mapping[tuple[str, str, int], int]
) -> Iterator[Metric]:
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


def _of_requests(prefix: str, models: dict[str, ModelStats]) -> Iterator[Metric]:
    for name, meaning, counter in _MODEL_COUNTERS:
        family = CounterMetricFamily(f"{prefix}:{name}", meaning, labels=_MODEL_LABELS)
        for model_name, stats in models.items():
            family.add_metric([model_name, _ENGINE], counter(stats))
        yield family
    sources = CounterMetricFamily(
        f"{prefix}:prompt_tokens_by_source", "Prompt tokens by where they came from.", labels=[*_MODEL_LABELS, "source"]
    )
    finished = CounterMetricFamily(
        f"{prefix}:request_success", "Finished choices.", labels=[*_MODEL_LABELS, "finished_reason"]
    )
    cancelled = CounterMetricFamily(
        f"{prefix}:requests_cancelled", "Requests that were cancelled.", labels=[*_MODEL_LABELS, "phase"]
    )
    for model_name, stats in models.items():
        for source, of_stats in _PROMPT_SOURCES:
            sources.add_metric([model_name, _ENGINE, source], of_stats(stats))
        for reason in FINISHED_REASONS:
            finished.add_metric([model_name, _ENGINE, reason], stats.finished[reason])
        for phase in CANCEL_PHASES:
            cancelled.add_metric([model_name, _ENGINE, phase], stats.cancelled[phase])
    yield sources
    yield finished
    yield cancelled


def _of_engines(prefix: str, engines: dict[str, EngineFigures]) -> Iterator[Metric]:
    loaded = {name: figures for name, figures in engines.items() if figures.status is not None}
    waiting = GaugeMetricFamily(
        f"{prefix}:num_requests_waiting_by_reason", "Why sequences wait.", labels=[*_MODEL_LABELS, "reason"]
    )
    for model_name, figures in loaded.items():
        for reason, of_figures in _WAITING:
            waiting.add_metric([model_name, _ENGINE, reason], of_figures(figures))
    yield waiting
    for name, meaning, of_figures in _ENGINE_GAUGES:
        gauge = GaugeMetricFamily(f"{prefix}:{name}", meaning, labels=_MODEL_LABELS)
        for model_name, figures in loaded.items():
            gauge.add_metric([model_name, _ENGINE], of_figures(figures))
        yield gauge
    for name, meaning, of_figures in _ENGINE_COUNTERS:
        counter = CounterMetricFamily(f"{prefix}:{name}", meaning, labels=_MODEL_LABELS)
        for model_name, figures in engines.items():
            counter.add_metric([model_name, _ENGINE], of_figures(figures))
        yield counter
    for name, meaning, of_metrics in _HISTOGRAMS:
        family = HistogramMetricFamily(f"{prefix}:{name}", meaning, labels=_MODEL_LABELS)
        for model_name, figures in engines.items():
            seen = of_metrics(figures.totals)
            family.add_metric([model_name, _ENGINE], _buckets(seen.bounds, seen.counts), seen.total)
        yield family
    yield _engine_states(prefix, loaded)
    yield _cache_configuration(prefix, loaded)


def _engine_states(prefix: str, engines: dict[str, EngineFigures]) -> Metric:
    states = GaugeMetricFamily(
        f"{prefix}:engine_state", "1 for the state that the engine is in.", labels=[*_MODEL_LABELS, "state"]
    )
    for model_name, figures in engines.items():
        for state in EngineState:
            states.add_metric(
                [model_name, _ENGINE, state.value], figures.status is not None and figures.status.state is state
            )
    return states


def _cache_configuration(prefix: str, engines: dict[str, EngineFigures]) -> Metric:
    labels = ["block_size", "num_gpu_blocks", "cache_dtype", "kv_bytes_per_token", "max_model_len", "max_num_seqs"]
    family = GaugeMetricFamily(
        f"{prefix}:cache_config_info",
        "Always 1; the labels say the KV cache's layout.",
        labels=[*_MODEL_LABELS, *labels],
    )
    for model_name, figures in engines.items():
        info = figures.info
        if info is not None:
            sizes = (
                info.block_size,
                info.num_blocks,
                info.kv_dtype,
                info.kv_bytes_per_token,
                info.max_model_len,
                info.max_num_seqs,
            )
            family.add_metric([model_name, _ENGINE, *map(str, sizes)], 1)
    return family


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """The cumulative counts by their upper bounds, for the exposition."""
    total = 0
    buckets = []
    for bound, count in zip([*bounds, float("inf")], counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(total)))
    return buckets
