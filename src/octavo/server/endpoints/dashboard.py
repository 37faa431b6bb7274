"""`/dashboard/data`: the figures of the dashboard, without a question to an engine.

All counters are totals. The page takes the difference of two answers, so the server keeps no history.
"""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from octavo import __version__
from octavo.engine.metrics import Histogram
from octavo.server.models.model_manager import ModelStatus
from octavo.server.observability.metric_values import EngineFigures, ModelStats
from octavo.server.state import state_of

router = APIRouter(include_in_schema=False)


@router.get("/dashboard/data")
async def get_dashboard_data(request: Request) -> JSONResponse:
    """The figures of the dashboard."""
    state = state_of(request)
    metrics = state.metrics
    metrics.refresh_statuses()
    now = time.monotonic()
    models = [
        _model(status, metrics.models.get(status.name, ModelStats()), metrics.engines.get(status.name, EngineFigures()))
        for status in state.models.statuses()
    ]
    data = {
        "version": __version__,
        "time_s": now,  # of a clock that only runs forward
        "uptime_s": now - state.started_at,
        "models": models,
        "rejected": metrics.rejected,
        "num_http_errors": sum(count for (_, _, status), count in metrics.http.items() if status >= 500),
    }
    return JSONResponse(data)


def _model(model: ModelStatus, stats: ModelStats, figures: EngineFigures) -> dict[str, Any]:
    """`state` is that of the engine if it is loaded, else that of the model."""
    status, info = figures.status, model.info
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
        "resident_bytes": figures.resident_bytes,
        "num_prompt_tokens": stats.num_prompt_tokens,
        "num_cached_tokens": stats.num_cached_tokens,
        "num_generated_tokens": stats.num_generated_tokens,
        "finished": stats.finished,
        "cancelled": stats.cancelled,
        "time_to_first_token": _histogram(figures.totals.time_to_first_token_s),
        "inter_token_latency": _histogram(figures.totals.inter_token_s),
        "e2e_latency": _histogram(figures.totals.e2e_s),
    }


def _histogram(histogram: Histogram) -> dict[str, Any]:
    """Bounds in seconds, and one more count than bounds, not cumulative."""
    return {"bounds": histogram.bounds, "counts": list(histogram.counts)}
