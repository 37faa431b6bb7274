"""The dashboard's figures and their history over the last 15 minutes."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from octavo import __version__
from octavo.engine.metrics import Histogram
from octavo.server.models.model_manager import ModelEntry
from octavo.server.observability.metrics import ServerMetrics

if TYPE_CHECKING:
    from octavo.server.server_state import ServerState

SPAN_S = 15 * 60
INTERVAL_S = 5.0


class DashboardHistory:
    """Snapshots of the last 15 minutes, taken every 5 seconds: at most 180, of a few KB each."""

    def __init__(self) -> None:
        self._samples: deque[dict[str, Any]] = deque(maxlen=int(SPAN_S / INTERVAL_S))

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Return the snapshots, oldest first."""
        return list(self._samples)

    def add(self, sample: dict[str, Any]) -> None:
        self._samples.append(sample)

    async def record(self, state: ServerState) -> None:
        """Take a snapshot every `INTERVAL_S` seconds. Never returns."""
        while True:
            self.add(snapshot(state))
            await asyncio.sleep(INTERVAL_S)


def snapshot(state: ServerState) -> dict[str, Any]:
    """Return all figures of the dashboard as JSON, without asking an engine. Counters are totals."""
    metrics = state.metrics
    metrics.refresh_statuses()
    now = time.monotonic()
    return {
        "version": __version__,
        "time_s": now,  # from a clock that never runs backwards
        "uptime_s": now - state.started_at,
        "models": [_model(entry, metrics) for entry in state.models.entries],
        "rejected": dict(metrics.rejected),
        "num_http_errors": sum(
            # Refusals are counted separately, and "not yet" is not an error for a polling client: both are 503.
            count
            for (*_, status), count in metrics.http.items()
            if status >= 500 and status != 503
        ),
    }


def _model(model: ModelEntry, metrics: ServerMetrics) -> dict[str, Any]:
    """Return a model's figures. `state` is the state of its engines if it is loaded, otherwise its own state."""
    figures, info = metrics.of_model(model.name), model.info
    status = model.model.client.status() if model.model is not None else None
    return {
        "name": model.name,
        "state": status.state.value if status is not None else model.state,
        "reason": status.reason if status is not None else None,
        "num_running": figures.num_running,
        "num_waiting": figures.num_waiting,
        "max_num_seqs": info.max_num_seqs if info is not None else 0,
        "num_used_blocks": figures.current.num_used_blocks,
        "num_blocks": figures.current.num_blocks,
        "num_cache_tokens": info.num_cache_tokens if info is not None else 0,
        "num_restarts": figures.num_restarts,
        "resident_bytes": sum(replica.resident_bytes for replica in metrics.models.get(model.name, ())),
        "num_prompt_tokens": figures.num_prompt_tokens,
        "num_cached_tokens": figures.num_cached_tokens,
        "num_generated_tokens": figures.num_generated_tokens,
        "finished": dict(figures.finished),
        "cancelled": dict(figures.cancelled),
        "time_to_first_token": _histogram(figures.totals.time_to_first_token_s),
        "inter_token_latency": _histogram(figures.totals.inter_token_s),
        "e2e_latency": _histogram(figures.totals.e2e_s),
    }


def _histogram(histogram: Histogram) -> dict[str, Any]:
    """Return a histogram's bounds in seconds and its counts, which are not cumulative. There is one more count than
    there are bounds.
    """
    return {"bounds": histogram.bounds, "counts": list(histogram.counts)}
