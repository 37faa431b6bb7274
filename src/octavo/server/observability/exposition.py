"""The name, meaning and labels of every metric, exported in Prometheus's text format or as OpenMetrics.

Metrics that vLLM also has use its names, labels and units, so that its dashboards and autoscalers work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

from prometheus_client import Metric, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from octavo.engine.client import EngineState, ModelInfo
from octavo.engine.metrics import EngineMetrics, Histogram
from octavo.server.observability.batch_figures import BATCH_ENDS, LINE_RESULTS, TOKEN_KINDS, BatchFigures
from octavo.server.observability.metrics import (
    CANCEL_PHASES,
    FINISHED_REASONS,
    REJECTED_REASONS,
    ModelFigures,
    ServerMetrics,
)

_NO_ESCAPING = "allow-utf-8"
_PROCESS = ProcessCollector(registry=None)
_MODEL_LABELS = ("model_name", "engine")

# By model name and replica number.
_Engines: TypeAlias = Mapping[tuple[str, str], ModelFigures]
_Values: TypeAlias = Mapping[tuple[str, ...], float]
# Name, meaning, labels and value. If there are labels, the value is a mapping from labels to values.
_Row: TypeAlias = tuple[str, str, tuple[str, ...], Callable[[ModelFigures], float | _Values]]


def _by(names: Sequence[str], counts: Mapping[str, int]) -> _Values:
    return {(name,): counts[name] for name in names}


def _by_key(counts: Mapping[str, int]) -> _Values:
    return {(key,): count for key, count in counts.items()}


def _kv_usage(figures: ModelFigures) -> float:
    return figures.current.num_used_blocks / max(figures.current.num_blocks, 1)


def _cache_layout(info: ModelInfo) -> tuple[str, ...]:
    sizes = (info.block_size, info.num_blocks, info.kv_dtype, info.kv_bytes_per_token)
    return tuple(map(str, (*sizes, info.max_model_len, info.max_num_seqs)))


_COUNTERS: tuple[_Row, ...] = (
    ("prompt_tokens", "Prompt tokens of requests that got their first token.", (), lambda f: f.num_prompt_tokens),
    (
        "prompt_tokens_cached",
        "Prompt tokens of these requests that were already cached.",
        (),
        lambda f: f.num_cached_tokens,
    ),
    ("generation_tokens", "Generated tokens.", (), lambda f: f.num_generated_tokens),
    ("prefix_cache_queries", "Tokens looked up in the prefix cache.", (), lambda f: f.num_prompt_tokens),
    (
        "prefix_cache_hits",
        "Tokens found in the prefix cache.",
        (),
        lambda f: f.num_cached_tokens - f.num_loaded_tokens,
    ),
    (
        "external_prefix_cache_queries",
        "Tokens missing from the prefix cache and looked up in the prompt store.",
        (),
        lambda f: f.totals.num_store_queries_total,
    ),
    (
        "external_prefix_cache_hits",
        "Tokens loaded from the prompt store.",
        (),
        lambda f: f.totals.num_store_hits_total,
    ),
    ("prompt_store_read_bytes", "Bytes read from the prompt store.", (), lambda f: f.totals.num_store_bytes_read_total),
    (
        "prompt_store_written_bytes",
        "Bytes written to the prompt store.",
        (),
        lambda f: f.totals.num_store_bytes_written_total,
    ),
    (
        "prompt_store_dropped_records",
        "Damaged records of the prompt store, whose tokens were computed again.",
        (),
        lambda f: f.totals.num_store_records_dropped_total,
    ),
    ("corrupted_requests", "Requests that ended because of a NaN or infinity.", (), lambda f: f.num_corrupted),
    (
        "prompt_tokens_by_source",
        "Prompt tokens by origin: computed, in the engine's own cache, or in the prompt store.",
        ("source",),
        lambda f: {
            ("local_compute",): f.num_prompt_tokens - f.num_cached_tokens,
            ("local_cache_hit",): f.num_cached_tokens - f.num_loaded_tokens,
            ("external_kv_transfer",): f.num_loaded_tokens,
        },
    ),
    ("request_success", "Finished choices.", ("finished_reason",), lambda f: _by(FINISHED_REASONS, f.finished)),
    ("requests_cancelled", "Requests that were cancelled.", ("phase",), lambda f: _by(CANCEL_PHASES, f.cancelled)),
    (
        "num_preemptions",
        "Sequences that gave their KV blocks to other sequences.",
        (),
        lambda f: f.totals.num_preemptions_total,
    ),
    ("kv_block_evictions", "Cached KV blocks that were overwritten.", (), lambda f: f.totals.num_evictions_total),
    ("engine_steps", "Steps of the engine.", (), lambda f: f.totals.num_steps_total),
    (
        "spec_decode_num_drafts",
        "Times that a sequence had drafts in a step.",
        (),
        lambda f: f.totals.num_drafts_total,
    ),
    (
        "spec_decode_num_draft_tokens",
        "Draft tokens that steps computed.",
        (),
        lambda f: sum(f.totals.num_draft_tokens_total.values()),
    ),
    (
        "spec_decode_num_accepted_tokens",
        "Draft tokens that were right.",
        (),
        lambda f: sum(f.totals.num_accepted_draft_tokens_total.values()),
    ),
    (
        "spec_decode_num_accepted_tokens_per_pos",
        "Right draft tokens by position among the drafts of a step.",
        ("position",),
        lambda f: _by_key(f.totals.num_accepted_by_position_total),
    ),
    (
        "spec_decode_num_draft_tokens_by_source",
        "Draft tokens by the source that guessed them.",
        ("source",),
        lambda f: _by_key(f.totals.num_draft_tokens_total),
    ),
    (
        "spec_decode_num_accepted_tokens_by_source",
        "Right draft tokens by the source that guessed them.",
        ("source",),
        lambda f: _by_key(f.totals.num_accepted_draft_tokens_total),
    ),
    ("engine_restarts", "Restarts of the engine's process.", (), lambda f: f.num_restarts),
)
# Figures of loaded models.
_GAUGES: tuple[_Row, ...] = (
    ("kv_cache_usage_perc", "KV cache blocks in use, 0 to 1.", (), _kv_usage),
    ("gpu_cache_usage_perc", "The older name of kv_cache_usage_perc, for dashboards that use it.", (), _kv_usage),
    (
        "engine_load_progress",
        "Loaded part of the model, 0 to 1.",
        (),
        lambda f: f.status.load_progress if f.status is not None else 0.0,
    ),
    ("num_requests_running", "Running sequences and texts to embed.", (), lambda f: f.num_running),
    ("num_requests_waiting", "Waiting sequences and texts to embed.", (), lambda f: f.num_waiting),
    (
        "num_requests_waiting_by_reason",
        "Waiting sequences by reason. Only a lack of blocks or the limit --max-num-seqs makes them wait.",
        ("reason",),
        lambda f: {("capacity",): f.num_waiting, ("deferred",): 0},
    ),
    (
        "spec_decode_source_enabled",
        "1 for a draft source in use, 0 for a draft model that has failed.",
        ("source",),
        lambda f: _by_key(f.info.drafts_in_use(f.current)) if f.info is not None else {},
    ),
    (
        "spec_decode_off_info",
        "1 if speculation is off; the label gives the reason.",
        ("reason",),
        lambda f: {(f.info.no_drafts,): 1} if f.info is not None and f.info.no_drafts else {},
    ),
    ("engine_resident_memory_bytes", "Physical memory of the engine's process.", (), lambda f: f.resident_bytes),
    ("grammar_cache_bytes", "Memory of compiled grammars.", (), lambda f: f.current.grammar_cache_bytes),
    (
        "engine_state",
        "1 for the current state of the engine.",
        ("state",),
        lambda f: {(state.value,): f.status is not None and f.status.state is state for state in EngineState},
    ),
    (
        "cache_config_info",
        "Always 1; the labels give the layout of the KV cache.",
        ("block_size", "num_gpu_blocks", "cache_dtype", "kv_bytes_per_token", "max_model_len", "max_num_seqs"),
        lambda f: {_cache_layout(f.info): 1} if f.info is not None else {},
    ),
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
    ("request_queue_time_seconds", "Time in the queue.", lambda m: m.queue_s),
    ("request_prefill_time_seconds", "Computing the prompt.", lambda m: m.prefill_s),
    ("request_decode_time_seconds", "From the first token to the last.", lambda m: m.decode_s),
    ("request_inference_time_seconds", "Prefill and decode together.", lambda m: m.inference_s),
    ("request_prompt_tokens", "Prompt tokens of a finished request.", lambda m: m.prompt_tokens),
    (
        "request_prefill_kv_computed_tokens",
        "Prompt tokens of a finished request that were not in the prefix cache.",
        lambda m: m.computed_tokens,
    ),
    ("request_num_preemptions", "Preemptions of a finished request.", lambda m: m.preemptions),
    ("request_generation_tokens", "Generated tokens of a finished request, all choices.", lambda m: m.generated_tokens),
    ("request_max_num_generation_tokens", "Tokens of a request's longest choice.", lambda m: m.longest_choice),
    ("request_params_n", "The parameter n.", lambda m: m.params_n),
    ("request_params_max_tokens", "The parameter max_tokens.", lambda m: m.params_max_tokens),
    ("iteration_tokens_total", "Tokens computed in one step of the engine.", lambda m: m.batched_tokens),
)


def export(metrics: ServerMetrics, accept: str) -> tuple[bytes, str]:
    """Return (body, content type) in the format that fits the Accept header: OpenMetrics or Prometheus's text
    format.
    """
    # Our names are valid, but these libraries' escaping would replace the colon of the prefix.
    if "application/openmetrics-text" in accept:
        body: bytes = openmetrics.generate_latest(_Exposition(metrics), escaping=_NO_ESCAPING)  # type: ignore[no-untyped-call]
        return body, openmetrics.CONTENT_TYPE_LATEST
    return generate_latest(_Exposition(metrics), escaping=_NO_ESCAPING), CONTENT_TYPE_PLAIN_0_0_4


@dataclass(frozen=True)
class _Exposition(Collector):
    """All metrics of a server and its process, one family after another."""

    metrics: ServerMetrics

    def collect(self) -> Iterator[Metric]:
        prefix, models = self.metrics.prefix, self.metrics.models
        engines = {(name, str(i)): figures for name, each in models.items() for i, figures in enumerate(each)}
        loaded = {labels: figures for labels, figures in engines.items() if figures.status is not None}
        yield from _families(CounterMetricFamily, prefix, _COUNTERS, engines)
        yield from _families(GaugeMetricFamily, prefix, _GAUGES, loaded)
        for name, meaning, of_metrics in _HISTOGRAMS:
            histograms = HistogramMetricFamily(f"{prefix}:{name}", meaning, labels=_MODEL_LABELS)
            for engine, figures in engines.items():
                seen = of_metrics(figures.totals)
                histograms.add_metric(engine, _buckets(seen), seen.total)
            yield histograms
        meaning = "Requests answered with an error instead of a result."
        rejections = CounterMetricFamily(f"{prefix}:requests_rejected", meaning, labels=["reason"])
        for reason in REJECTED_REASONS:
            rejections.add_metric([reason], self.metrics.rejected[reason])
        yield rejections
        yield from _adapters(prefix, self.metrics)
        labels = ["route", "method", "status"]
        responses = CounterMetricFamily(f"{prefix}:http_requests", "HTTP responses by route template.", labels=labels)
        for values, count in self.metrics.http.items():
            responses.add_metric([str(value) for value in values], count)
        yield responses
        if self.metrics.batches is not None:
            yield from _batch_families(prefix, self.metrics.batches)
        yield from _PROCESS.collect()


def _batch_families(prefix: str, figures: BatchFigures) -> Iterator[Metric]:
    """Yield the metrics of batches. The histograms of live requests do not include the lines of batches."""
    counters = (
        ("batches_ended", "Batches that have ended.", "status", BATCH_ENDS, figures.ended),
        ("batch_lines", "Batch lines with a result.", "result", LINE_RESULTS, figures.lines),
        ("batch_tokens", "Tokens of answers to batch lines.", "kind", TOKEN_KINDS, figures.tokens),
    )
    for name, meaning, label, values, counts in counters:
        counter = CounterMetricFamily(f"{prefix}:{name}", meaning, labels=[label])
        for value in values:
            counter.add_metric([value], counts[value])
        yield counter
    states = {"running": figures.num_running, "waiting": figures.num_batches - figures.num_running}
    gauge = GaugeMetricFamily(f"{prefix}:batches", "Batches that have not ended.", labels=["state"])
    for state, count in states.items():
        gauge.add_metric([state], count)
    yield gauge
    meaning = "Batch lines that are running or waiting for a row."
    yield GaugeMetricFamily(f"{prefix}:batch_lines_running", meaning, value=figures.num_running_lines)


def _adapters(prefix: str, metrics: ServerMetrics) -> Iterator[Metric]:
    """Yield the families of metrics about adapters, labelled by name."""
    figures, sizes, label = metrics.adapters, metrics.adapter_bytes(), ["adapter"]
    running = ",".join(sorted(name for name, each in figures.items() if each.num_running))
    info = GaugeMetricFamily(
        f"{prefix}:lora_requests_info",
        "Always 1; the labels name the adapters of running requests.",
        labels=["running_lora_adapters", "waiting_lora_adapters", "max_lora"],
    )
    info.add_metric([running, "", str(metrics.max_loras)], 1)
    yield info
    loads = CounterMetricFamily(f"{prefix}:lora_loads", "Times that an engine loaded an adapter.", labels=label)
    requests = CounterMetricFamily(f"{prefix}:lora_requests", "Finished requests of an adapter.", labels=label)
    for name, each in figures.items():
        loads.add_metric([name], each.num_loads)
        requests.add_metric([name], each.num_requests)
    nbytes = GaugeMetricFamily(f"{prefix}:lora_bytes", "Bytes of an adapter's files.", labels=label)
    for name, size in sizes.items():
        nbytes.add_metric([name], size)
    yield from (loads, requests, nbytes)


def _families(
    kind: type[CounterMetricFamily | GaugeMetricFamily], prefix: str, rows: Sequence[_Row], engines: _Engines
) -> Iterator[Metric]:
    """Yield one family per row, with the values of each replica of each model."""
    for name, meaning, labels, values_of in rows:
        family = kind(f"{prefix}:{name}", meaning, labels=[*_MODEL_LABELS, *labels])
        for engine, figures in engines.items():
            values = values_of(figures)
            for own, value in values.items() if isinstance(values, Mapping) else [((), values)]:
                family.add_metric([*engine, *own], value)
        yield family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return the cumulative counts by their upper bounds, for the exposition."""
    uppers = [*(repr(float(bound)) for bound in histogram.bounds), "+Inf"]
    return [(upper, float(total)) for upper, total in zip(uppers, accumulate(histogram.counts), strict=True)]
