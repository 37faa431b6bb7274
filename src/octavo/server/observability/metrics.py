"""The metrics of a server, for Prometheus and for its own dashboard, under the names that vLLM's dashboards expect.

Every figure has one source. Requests, tokens and finish reasons are counted when answers leave the server
(`ObservedClient`). Times, sizes and states are measured once, by the engine, and read from it; a restart does not lower
its counts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

import anyio
from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from octavo.core.client import EngineClient
from octavo.errors import OctavoError, UsageError
from octavo.server.observability import metric_families
from octavo.server.observability.metric_values import (
    METHODS,
    REJECTED_REASONS,
    UNKNOWN,
    EngineFigures,
    ModelStats,
    resident_bytes,
)
from octavo.server.observability.tracing import RequestTracer

# An engine in a long step answers late; a scrape then shows its earlier figures.
ENGINE_ANSWER_TIMEOUT_S = 0.5
_NO_ESCAPING = "allow-utf-8"
_PREFIX = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


class ServerMetrics:
    """All counts of a server. Belongs to its event loop.

    `ObservedClient` calls `served` and `ended`; the guard calls `http_request` once per response; readers of the
    figures call `refresh` first.
    """

    def __init__(self, prefix: str = "vllm", *, tracer: RequestTracer | None = None) -> None:
        """tracer: traces every request; see `start_tracer`."""
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
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def served(self, model_name: str, client: EngineClient) -> ModelStats:
        """Notes that this model is served from now on. Called with each client of the name, also after a reload."""
        self._clients[model_name] = client
        if model_name in self.engines:
            self.engines[model_name].left()
        return self.models.setdefault(model_name, ModelStats())

    def ended(self, model_name: str, client: EngineClient) -> None:
        """Notes that this client no longer serves the model: its counters stay, and its gauges are removed."""
        if self._clients.get(model_name) is not client:
            return  # another one has taken over
        del self._clients[model_name]
        figures = self.engines.get(model_name)
        if figures is not None:
            figures.left()

    def http_request(self, route: str | None, method: str, status: int, error_code: str | None = None) -> None:
        """Counts a response.

        route: the route's template, such as `/v1/requests/{id}/cancel`, never the requested path; None: no route
        matches. method: as received; methods unknown to HTTP count as one. error_code: that of an error response;
        those of POST requests also count as rejected.
        """
        known_method = method if method in METHODS else UNKNOWN
        self.http[route or UNKNOWN, known_method, status] += 1
        if status >= 400 and route is not None and known_method == "POST":
            reason = error_code or UNKNOWN
            if reason not in REJECTED_REASONS:
                reason = "invalid_request" if status < 500 else UNKNOWN
            self.rejected[reason] += 1

    async def refresh(self) -> None:
        """Gets the figures of every engine, within ENGINE_ANSWER_TIMEOUT_S in any case."""
        self.refresh_statuses()
        async with anyio.create_task_group() as group:
            for model_name, client in list(self._clients.items()):
                group.start_soon(_ask_engine, client, self.engines[model_name])

    def refresh_statuses(self) -> None:
        """Updates the figures that are known without asking the engine, at most a quarter of a second old."""
        for model_name, client in self._clients.items():
            status = client.status()
            figures = self.engines.setdefault(model_name, EngineFigures())
            figures.saw(status, status.metrics)
            figures.resident_bytes = resident_bytes(status.pid)
            with suppress(OctavoError):  # it was never ready
                figures.info = client.info

    def export(self, accept: str) -> tuple[bytes, str]:
        """(body, content type) of the exposition that fits the Accept header: OpenMetrics or Prometheus's own text."""
        # Our names are valid; the escaping of these libraries would replace the colon of the prefix.
        if "application/openmetrics-text" in accept:
            body: bytes = openmetrics.generate_latest(self._registry, escaping=_NO_ESCAPING)  # type: ignore[no-untyped-call]
            return body, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self._registry, escaping=_NO_ESCAPING), CONTENT_TYPE_PLAIN_0_0_4

    def collect(self) -> Iterable[Metric]:
        """The metrics for the registry; the interface of a collector."""
        return metric_families.collect(self.prefix, self.models, self.engines, self.rejected, self.http)


async def _ask_engine(client: EngineClient, figures: EngineFigures) -> None:
    with suppress(OctavoError), anyio.move_on_after(ENGINE_ANSWER_TIMEOUT_S):  # its state, which is shown, says why
        figures.saw(client.status(), await client.metrics())
