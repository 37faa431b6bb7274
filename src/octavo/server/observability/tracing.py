"""Traces of every request through OpenTelemetry, if enabled and installed.

Each request has one span with the children `queue`, `prefill` and `decode`, under the trace in the caller's
`traceparent` (W3C Trace Context). Attributes follow OpenTelemetry's conventions for generative AI, but never contain
the text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import anyio.to_thread
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo import __version__
from octavo.errors import UsageError
from octavo.generation_request import GenerationRequest
from octavo.outputs import RequestMetrics

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

_NS = 1_000_000_000

_http_request: ContextVar[Scope | None] = ContextVar("http_request", default=None)


def trace_context(app: ASGIApp) -> ASGIApp:
    """Wrap the application in ASGI middleware that stores the caller's trace context. The spans of a request need it,
    and they are created in a separate task.
    """

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        _http_request.set(scope)
        await app(scope, receive, send)

    return call


def start_tracer(endpoint: str | None) -> RequestTracer | None:
    """Return a tracer that sends to this OTLP/HTTP endpoint in the background, or None without an endpoint.

    endpoint: the collector's URL; `/v1/traces` is added if it has no path

    Raises UsageError if the endpoint is not a URL, or if OpenTelemetry is not installed.
    """
    if endpoint is None:
        return None
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.netloc:
        raise UsageError(
            f"otlp_endpoint is {endpoint!r}; it must be a URL such as http://localhost:4318", param="otlp_endpoint"
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise UsageError(
            f"otlp_endpoint needs OpenTelemetry, which is not installed: pip install 'octavo[otel]' ({error})",
            param="otlp_endpoint",
        ) from None
    if url.path in ("", "/"):
        endpoint = url._replace(path="/v1/traces").geturl()
    resource = Resource.create({"service.name": "octavo", "service.version": __version__})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=5)))
    return RequestTracer(provider)


class RequestTracer:
    """Starts the spans of requests."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("octavo.server", __version__)

    def begin(self, model_name: str, request: GenerationRequest) -> RequestSpan:
        """Start the span of a prompt given to the engine."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        http_request = _http_request.get() or {"headers": (), "state": {}}  # empty when there is no server
        access = http_request["state"].get("access")
        route = str(getattr(access, "route", None) or "")
        operation = "chat" if getattr(access, "is_chat", False) else "text_completion"
        params = request.params.sampling
        attributes: dict[str, str | int | float] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "octavo",
            "gen_ai.request.model": model_name,
            "gen_ai.response.model": model_name,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k,
            "gen_ai.request.choice.count": request.params.num_choices,
        }
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
        if route:
            attributes["http.route"] = route
            attributes["octavo.request_id"] = access.request_id
        start_ns = time.time_ns()
        # The caller's span. If it is missing or malformed, the span starts a new trace.
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in http_request["headers"]}
        span = self._tracer.start_span(
            f"{operation} {model_name}",
            context=TraceContextTextMapPropagator().extract(carrier, context=Context()),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=start_ns,
        )
        return RequestSpan(self._tracer, span, start_ns)

    async def close(self) -> None:
        """Send the remaining spans and shut down."""
        await anyio.to_thread.run_sync(self._provider.shutdown)


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """The span of a running request."""

    tracer: Tracer
    span: Span
    start_ns: int

    def end(self, metrics: RequestMetrics, finish_reasons: Sequence[str], error: str | None = None) -> None:
        """End the span.

        metrics: the latest known metrics
        error: reason for an incomplete answer
        """
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        now_ns, span = time.time_ns(), self.span
        span.set_attribute("gen_ai.usage.input_tokens", metrics.num_prompt_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", metrics.num_generated_tokens)
        span.set_attribute("gen_ai.usage.cache_read.input_tokens", metrics.num_cached_tokens)
        if finish_reasons:
            span.set_attribute("gen_ai.response.finish_reasons", list(finish_reasons))
        if metrics.time_to_first_token_s is not None:
            span.set_attribute("gen_ai.latency.time_to_first_token", metrics.time_to_first_token_s)
            prefill_ns = self.start_ns + round(metrics.queue_s * _NS)
            decode_ns = prefill_ns + round(metrics.prefill_s * _NS)
            times = (self.start_ns, prefill_ns, decode_ns, now_ns)
            for name, (begin_ns, end_ns) in zip(("queue", "prefill", "decode"), pairwise(times), strict=True):
                phase = self.tracer.start_span(name, context=set_span_in_context(span), start_time=begin_ns)
                phase.end(end_time=max(begin_ns, end_ns))
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(end_time=now_ns)
