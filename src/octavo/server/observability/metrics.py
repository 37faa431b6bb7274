"""What the server counts, for Prometheus and for its own dashboard, under the names that vLLM's dashboards expect.

Every figure has one source. Requests, tokens and latencies are seen here, where answers leave for users
(`ObservedClient`): so they hold what users wait for, and never fall when an engine is restarted. Only what happens
inside the engine alone (its state, its KV cache, its steps, preemptions) is asked of it, when somebody looks.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

import anyio
from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from octavo.core.client import EngineClient
from octavo.errors import NumericalError, OctavoError, UsageError
from octavo.generation_request import GenerationRequest
from octavo.outputs import PoolingOutput, RequestMetrics, RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.server.observability import metric_families
from octavo.server.observability.metric_values import (
    FINISHED_REASONS,
    METHODS,
    REJECTED_REASONS,
    UNKNOWN,
    CancelPhase,
    EngineFigures,
    ModelStats,
    resident_bytes,
)
from octavo.server.observability.tracing import RequestTracer

# An engine in the middle of a long step answers late; a scrape then shows what it said before.
ENGINE_ANSWER_TIMEOUT_S = 0.5
_NO_ESCAPING = "allow-utf-8"
_PREFIX = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


class RequestMeter:
    """Watches one request of the engine; `ObservedClient` makes one a request and tells it everything."""

    def __init__(self, stats: ModelStats, request: GenerationRequest, clock: Callable[[], float]) -> None:
        self._stats = stats
        self._clock = clock
        self._start = clock()
        self._params = request.params
        self._last_token: dict[int, float] = {}  # choice -> when
        self._num_tokens: Counter[int] = Counter()  # by choice
        self._reasons: dict[int, str] = {}
        self._metrics = RequestMetrics()
        self.phase: CancelPhase = "prefill"
        self._stats.num_embedding += not self._params.is_answered
        self.has_ended = False

    @property
    def metrics(self) -> RequestMetrics:
        """The latest that the engine said."""
        return self._metrics

    @property
    def finish_reasons(self) -> Sequence[str]:
        """By choice, of those that have ended."""
        return [self._reasons[index] for index in sorted(self._reasons)]

    def saw(self, output: RequestOutput | PoolingOutput) -> None:
        """Called with every output on its way to the user."""
        if isinstance(output, PoolingOutput):
            self.close()
            return
        now = self._clock()
        stats = self._stats
        self._metrics = output.metrics
        for choice in output.outputs:
            if choice.finish_reason is not None:
                self._reasons[choice.index] = choice.finish_reason
            num_new = len(choice.token_ids)
            if not num_new:
                continue
            if self.phase == "prefill":
                self._first_token(now)
            before = self._last_token.get(choice.index)
            if before is not None:
                stats.inter_token_latency.observe((now - before) / num_new, num_new)
            self._last_token[choice.index] = now
            self._num_tokens[choice.index] += num_new
            stats.num_generated_tokens += num_new
        if output.finished:
            self._finished(now)

    def _first_token(self, now: float) -> None:
        self.phase = "decode"
        self._stats.time_to_first_token.observe(now - self._start)
        self._stats.num_prompt_tokens += self._metrics.num_prompt_tokens
        self._stats.num_cached_tokens += self._metrics.num_cached_tokens

    def _finished(self, now: float) -> None:
        if self.has_ended:
            return
        self.has_ended = True
        stats, metrics = self._stats, self._metrics
        num_tokens = self._num_tokens.total()
        for reason in self._reasons.values():
            stats.finished[reason if reason in FINISHED_REASONS else "stop"] += 1
        stats.e2e_latency.observe(now - self._start)
        stats.queue_time.observe(metrics.queue_s)
        stats.prefill_time.observe(metrics.prefill_s)
        stats.decode_time.observe(metrics.decode_s)
        stats.inference_time.observe(metrics.prefill_s + metrics.decode_s)
        stats.prompt_lengths.observe(metrics.num_prompt_tokens)
        stats.computed_lengths.observe(metrics.num_prompt_tokens - metrics.num_cached_tokens)
        stats.preemptions.observe(metrics.num_preemptions)
        stats.answer_lengths.observe(num_tokens)
        longest = max(self._num_tokens.values(), default=0)
        stats.longest_choices.observe(longest)
        if longest > 1:
            stats.time_per_output_token.observe(metrics.decode_s / (longest - 1))
        if isinstance(self._params, SamplingParams):
            stats.params_n.observe(self._params.n)
        if self._params.max_tokens is not None:
            stats.params_max_tokens.observe(self._params.max_tokens)

    def close(self) -> None:
        """Nothing more is counted of it; a text to embed is none of those in the engine any more."""
        if not self.has_ended:
            self.has_ended = True
            self._stats.num_embedding -= not self._params.is_answered

    def cancelled(self) -> None:
        """Nobody wants the rest: the client left, the request was cancelled or ran out of time."""
        if not self.has_ended and self._params.is_answered:
            self._stats.cancelled[self.phase] += 1
            self._stats.finished["abort"] += 1
        self.close()

    def failed(self, error: Exception) -> None:
        """The engine ended it with an error."""
        if not self.has_ended and self._params.is_answered:
            self._stats.finished["error"] += 1
            self._stats.num_corrupted += isinstance(error, NumericalError)
        self.close()


class ServerMetrics:
    """Everything a server counts. Belongs to its event loop.

    Who calls what: `ObservedClient` calls `served`, `ended` and `request_started`; the guard calls
    `http_request`, once a response; whoever shows the figures calls `refresh` before.
    """

    def __init__(
        self,
        prefix: str = "vllm",
        *,
        tracer: RequestTracer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """tracer: makes a trace of every request; see `start_tracer`."""
        if not _PREFIX.fullmatch(prefix):
            raise UsageError(
                f"metrics_prefix is {prefix!r}; it must be letters, digits and _ and not begin with a digit",
                param="metrics_prefix",
            )
        self.prefix = prefix
        self.tracer = tracer
        self.models: dict[str, ModelStats] = {}  # by served name; stays when a model is unloaded
        self.engines: dict[str, EngineFigures] = {}
        self.rejected: Counter[str] = Counter()
        self.http: Counter[tuple[str, str, int]] = Counter()  # (route, method, status)
        self._clients: dict[str, EngineClient] = {}
        self._clock = clock
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def served(self, model_name: str, client: EngineClient) -> None:
        """This model can be asked from now on. Called with each client that serves the name, also after a reload."""
        self.models.setdefault(model_name, ModelStats())
        self._clients[model_name] = client

    def ended(self, model_name: str, client: EngineClient) -> None:
        """This client serves the model no longer; its counters stay, its gauges leave."""
        if self._clients.get(model_name) is not client:
            return  # another one has taken over
        del self._clients[model_name]
        figures = self.engines.get(model_name)
        if figures is not None:
            figures.left()

    def request_started(self, model_name: str, request: GenerationRequest) -> RequestMeter:
        """One prompt was handed to the engine."""
        return RequestMeter(self.models.setdefault(model_name, ModelStats()), request, self._clock)

    def http_request(self, route: str | None, method: str, status: int, error_code: str | None = None) -> None:
        """A response was sent.

        route: the route's template, such as `/v1/requests/{id}/cancel`, never the path that was asked for; None: no
        route fits. method: as it came; all that HTTP does not know count as one. error_code: of a response that is an
        error; those of POST requests also count as rejected.
        """
        known_method = method if method in METHODS else UNKNOWN
        self.http[route or UNKNOWN, known_method, status] += 1
        if status >= 400 and route is not None and known_method == "POST":
            reason = error_code or UNKNOWN
            if reason not in REJECTED_REASONS:
                reason = "invalid_request" if status < 500 else UNKNOWN
            self.rejected[reason] += 1

    async def refresh(self) -> None:
        """Asks every engine for its figures; within ENGINE_ANSWER_TIMEOUT_S, whatever an engine does."""
        self.refresh_statuses()
        async with anyio.create_task_group() as group:
            for model_name, client in list(self._clients.items()):
                group.start_soon(_ask_engine, client, self.engines[model_name])

    def refresh_statuses(self) -> None:
        """Only what is known without asking: states, running and waiting sequences, blocks in use."""
        for model_name, client in self._clients.items():
            status = client.status()
            figures = self.engines.setdefault(model_name, EngineFigures(status))
            figures.saw_status(status, resident_bytes(status.pid), self.models[model_name].num_embedding)
            with suppress(OctavoError):  # it was never ready
                figures.info = client.info

    def export(self, accept: str) -> tuple[bytes, str]:
        """(body, content type) of the exposition that fits the Accept header: OpenMetrics or Prometheus's own text."""
        # Our names are valid as they are; what these libraries call escaping would replace the colon of the prefix.
        if "application/openmetrics-text" in accept:
            body: bytes = openmetrics.generate_latest(self._registry, escaping=_NO_ESCAPING)  # type: ignore[no-untyped-call]
            return body, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self._registry, escaping=_NO_ESCAPING), CONTENT_TYPE_PLAIN_0_0_4

    def collect(self) -> Iterable[Metric]:
        """What the registry asks for; the interface of a collector."""
        return metric_families.collect(self.prefix, self)


async def _ask_engine(client: EngineClient, figures: EngineFigures) -> None:
    numbers: Mapping[str, object] | None = None
    try:
        with anyio.move_on_after(ENGINE_ANSWER_TIMEOUT_S):
            numbers = await client.metrics()
    except OctavoError:
        return  # its state, which is shown, says why
    if numbers is not None:
        figures.saw_numbers(numbers)
