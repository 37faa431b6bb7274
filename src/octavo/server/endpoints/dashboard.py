"""`/dashboard/data`: the figures of the dashboard, a few hundred numbers that cost no engine anything.

All counters are totals: whoever asks twice takes the difference, so the server keeps no history for anyone.
"""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from pydantic import BaseModel

from octavo import __version__
from octavo.engine.metrics import Histogram
from octavo.server.endpoints.metrics import metrics_of
from octavo.server.models.model_manager import ModelStatus
from octavo.server.observability.metric_values import EngineFigures, ModelStats
from octavo.server.state import state_of

router = APIRouter(include_in_schema=False)


class HistogramData(BaseModel):
    """counts: one more than bounds, not cumulative. Bounds in seconds."""

    bounds: tuple[float, ...]
    counts: list[int]


class ModelData(BaseModel):
    name: str
    state: str  # of the engine if it is loaded, else of the model
    reason: str | None
    num_running: int
    num_waiting: int
    max_num_seqs: int
    num_used_blocks: int
    num_blocks: int
    block_size: int
    num_restarts: int
    resident_bytes: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    finished: dict[str, int]
    cancelled: dict[str, int]
    time_to_first_token: HistogramData
    inter_token_latency: HistogramData
    e2e_latency: HistogramData


class DashboardData(BaseModel):
    version: str
    time_s: float  # of a clock that only runs forward
    uptime_s: float
    models: list[ModelData]
    rejected: dict[str, int]
    num_http_errors: int  # answers with status 500 and above


@router.get("/dashboard/data")
async def get_dashboard_data(request: Request) -> DashboardData:
    """What the dashboard shows."""
    state = state_of(request)
    metrics = metrics_of(request)
    metrics.refresh_statuses()
    now = time.monotonic()
    return DashboardData(
        version=__version__,
        time_s=now,
        uptime_s=now - state.started_at,
        models=[
            _model(
                status, metrics.models.get(status.name, ModelStats()), metrics.engines.get(status.name, EngineFigures())
            )
            for status in state.models.statuses()
        ],
        rejected=dict(metrics.rejected),
        num_http_errors=sum(count for (_, _, status), count in metrics.http.items() if status >= 500),
    )


def _model(model: ModelStatus, stats: ModelStats, figures: EngineFigures) -> ModelData:
    status = figures.status
    info = model.info
    return ModelData(
        name=model.name,
        state=status.state.value if status is not None else model.state,
        reason=status.reason if status is not None else None,
        num_running=figures.num_running,
        num_waiting=figures.num_waiting,
        max_num_seqs=info.max_num_seqs if info is not None else 0,
        num_used_blocks=figures.current.num_used_blocks,
        num_blocks=figures.current.num_blocks,
        block_size=info.block_size if info is not None else 0,
        num_restarts=figures.num_restarts,
        resident_bytes=figures.resident_bytes,
        num_prompt_tokens=stats.num_prompt_tokens,
        num_cached_tokens=stats.num_cached_tokens,
        num_generated_tokens=stats.num_generated_tokens,
        finished=dict(stats.finished),
        cancelled=dict(stats.cancelled),
        time_to_first_token=_histogram(figures.totals.time_to_first_token_s),
        inter_token_latency=_histogram(figures.totals.inter_token_s),
        e2e_latency=_histogram(figures.totals.e2e_s),
    )


def _histogram(histogram: Histogram) -> HistogramData:
    return HistogramData(bounds=histogram.bounds, counts=list(histogram.counts))
