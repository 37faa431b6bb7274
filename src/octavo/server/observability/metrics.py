"""The server's figures: request counts, and the latest figures of its engines.

Every figure comes from a single source. Requests, tokens and finish reasons are counted when answers leave the server
(`ObservedClient`). Times, sizes and states are measured once, by the engine, and read from it. `exposition` exports
them to Prometheus, and `/dashboard/data` to the server's own page.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import anyio

from octavo.engine.client import EngineReplica, EngineStatus, ModelInfo
from octavo.engine.metrics import EngineMetrics
from octavo.errors import OctavoError, UsageError
from octavo.platform import processes
from octavo.server.observability.batch_figures import BatchFigures
from octavo.server.observability.tracing import RequestTracer

# An engine in a long step answers late. A scrape then shows its previous figures.
ENGINE_ANSWER_TIMEOUT_S = 0.5
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
_COUNTS = (
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_loaded_tokens",
    "num_generated_tokens",
    "num_corrupted",
    "finished",
    "cancelled",
    "num_restarts",
)
_PREFIX = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


@dataclass(slots=True)
class ModelFigures:
    """The figures of one replica of a model. Its counts never decrease, even if it is restarted or loaded again."""

    client: EngineReplica | None = None  # None while unloaded
    # Counted when answers leave the server.
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_loaded_tokens: int = 0  # how many of these were loaded from a store beyond the cache
    num_generated_tokens: int = 0
    num_corrupted: int = 0  # ended because the model computed a NaN
    finished: Counter[str] = field(default_factory=Counter)  # by FINISHED_REASONS, one per choice
    cancelled: Counter[str] = field(default_factory=Counter)  # by CANCEL_PHASES, one per request
    # The engine's latest figures.
    status: EngineStatus | None = None  # None while unloaded or not refreshed yet
    info: ModelInfo | None = None  # None until it is first ready
    num_restarts: int = 0
    current: EngineMetrics = field(default_factory=EngineMetrics)  # figures of the current process
    totals: EngineMetrics = field(default_factory=EngineMetrics)  # includes the counts of earlier processes
    _ended: EngineMetrics = field(default_factory=EngineMetrics)  # figures of earlier processes
    _process: tuple[int | None, int] | None = None  # process id and number of restarts, or None if there is none yet

    @property
    def num_running(self) -> int:
        """Number of sequences and texts being computed."""
        return self.current.num_running + self.current.num_embedding

    @property
    def num_waiting(self) -> int:
        """Number of waiting sequences and texts."""
        return self.current.num_waiting + self.current.num_embedding_waiting

    @property
    def resident_bytes(self) -> int:
        """Physical memory of the engine's process in bytes, or 0 if it is gone or unknown."""
        if self.status is None or self.status.pid is None:
            return 0
        return processes.resident_bytes(self.status.pid)

    def plus(self, other: ModelFigures) -> ModelFigures:
        """Return the sums of two replicas' figures, without their states."""
        sums: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in _COUNTS}
        current, totals = self.current.plus(other.current), self.totals.plus(other.totals)
        return ModelFigures(**sums, current=current, totals=totals)

    def serve(self, client: EngineReplica | None) -> None:
        """Record that this client now serves the replica, or that the replica is unloaded (None), which removes its
        gauges.
        """
        self.client, self.status, self._process = client, None, None

    def refresh(self) -> None:
        """Update the figures without asking the engine, from its latest report. This is at most a quarter of a second
        old.
        """
        if self.client is not None:
            status = self.client.status()
            self._update(status, status.metrics)
            with suppress(OctavoError):  # it was never ready
                self.info = self.client.info

    async def ask(self) -> None:
        """Get the engine's current figures. This never takes longer than ENGINE_ANSWER_TIMEOUT_S."""
        if self.client is not None:
            with suppress(OctavoError), anyio.move_on_after(ENGINE_ANSWER_TIMEOUT_S):  # its state shows the reason
                self._update(self.client.status(), await self.client.metrics())

    def _update(self, status: EngineStatus, metrics: EngineMetrics) -> None:
        """Update the figures.

        metrics: metrics from the status, or newer ones
        """
        process = (status.pid, status.num_restarts)
        if process != self._process:
            self._process, self._ended, self.current = process, self.totals, EngineMetrics()
        if metrics.num_steps_total >= self.current.num_steps_total:  # otherwise it is older and took longer to arrive
            self.current, self.totals = metrics, metrics.after(self._ended)
        self.num_restarts += max(status.num_restarts - (self.status.num_restarts if self.status else 0), 0)
        self.status = status


@dataclass(slots=True)
class AdapterFigures:
    """Counts for one adapter.

    num_running: number of requests that engines are processing now
    """

    num_loads: int = 0
    num_requests: int = 0
    num_running: int = 0


class ServerMetrics:
    """All figures of a server. Belongs to its event loop.

    `ObservedClient` counts requests in `models`, and the guard calls `http_request` once per response. Readers of the
    figures call `refresh` or `refresh_statuses` first.
    """

    def __init__(self, prefix: str = "vllm", *, tracer: RequestTracer | None = None) -> None:
        """Initialize the metrics.

        prefix: prefix of the names in the exposition
        tracer: traces every request; see `start_tracer`
        """
        if not _PREFIX.fullmatch(prefix):
            raise UsageError(
                f"metrics_prefix is {prefix!r}; it must be letters, digits and _ and not begin with a digit",
                param="metrics_prefix",
            )
        self.prefix = prefix
        self.tracer = tracer
        # By served name, one for each replica. They are kept when a model is unloaded.
        self.models: dict[str, list[ModelFigures]] = {}
        self.batches: BatchFigures | None = None  # set if the server runs batches
        self.adapters: dict[str, AdapterFigures] = {}  # by name
        self.max_loras = 0  # maximum number of adapters in one step
        self.adapter_bytes: Callable[[], Mapping[str, int]] = dict  # file sizes of the adapters known now
        self.rejected: Counter[str] = Counter()
        self.http: Counter[tuple[str, str, int]] = Counter()  # (route, method, status)

    def adapter(self, engine_name: str) -> AdapterFigures:
        """Return the figures of an adapter.

        engine_name: its name in the engine; this contains its name in requests after its number and scale
        """
        return self.adapters.setdefault(engine_name.split(":", 2)[-1], AdapterFigures())

    def http_request(self, route: str | None, method: str, status: int, error_code: str | None = None) -> None:
        """Count a response.

        route: the route's template, such as `/v1/requests/{id}/cancel`, never the requested path; None if no route
        matches
        method: as received; all methods unknown to HTTP are counted together
        error_code: code of an error response; errors of POST requests also count as rejected
        """
        known_method = method if method in METHODS else UNKNOWN
        self.http[route or UNKNOWN, known_method, status] += 1
        if status >= 400 and route is not None and known_method == "POST":
            reason = error_code or UNKNOWN
            if reason not in REJECTED_REASONS:
                reason = "invalid_request" if status < 500 else UNKNOWN
            self.rejected[reason] += 1

    async def refresh(self) -> None:
        """Get the current figures of every engine."""
        self.refresh_statuses()
        async with anyio.create_task_group() as group:
            for figures in self._all:
                group.start_soon(figures.ask)

    def refresh_statuses(self) -> None:
        """Update the figures that are known without asking an engine."""
        for figures in self._all:
            figures.refresh()

    def of_model(self, name: str) -> ModelFigures:
        """Return the sums of the figures of a model's replicas."""
        return functools.reduce(ModelFigures.plus, self.models.get(name, []), ModelFigures())

    @property
    def _all(self) -> list[ModelFigures]:
        return [figures for replicas in self.models.values() for figures in replicas]
