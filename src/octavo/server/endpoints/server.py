"""The server itself: `/version`, `/load`, `/metrics` for Prometheus, `/dashboard/data`, and cancelling its requests."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from octavo import __version__
from octavo.engine.metrics import Histogram
from octavo.server.errors import ApiError
from octavo.server.models.model_manager import ModelEntry
from octavo.server.observability.exposition import export
from octavo.server.observability.metrics import ModelFigures
from octavo.server.state import state_of

router = APIRouter()


class Version(BaseModel):
    version: str


class Load(BaseModel):
    """server_load: admitted requests that have not ended, waiting ones included."""

    server_load: int


@router.get("/version", tags=["server"])
async def get_version() -> Version:
    """The version of the server."""
    return Version(version=__version__)


@router.get("/load", tags=["server"])
async def get_load(request: Request) -> Load:
    """The number of requests in the server, in vLLM's shape."""
    return Load(server_load=state_of(request).admission.num_requests)


@router.get("/metrics", tags=["server"], response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def get_metrics(request: Request) -> Response:
    """All metrics, in OpenMetrics's format if the Accept header names it and in Prometheus's own otherwise."""
    metrics = state_of(request).metrics
    await metrics.refresh()
    body, content_type = export(metrics, request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": content_type, "Vary": "Accept"})


class CancelledRequest(BaseModel):
    """A cancelled request."""

    id: str
    object: str = "request"
    cancelled: bool = True


@router.post("/v1/requests/{request_id}/cancel", tags=["requests"])
async def cancel_request(request: Request, request_id: str) -> CancelledRequest:
    """Ends a running or waiting request of the same API key, by the id in its header `x-request-id`.

    The cancelled request gets 499 `request_cancelled`, as its status or as the last event of its stream.
    """
    if not state_of(request).admission.cancel(request_id, request.state.tenant):
        raise ApiError(
            404, f"there is no running request {request_id!r:.80}", param="request_id", code="request_not_found"
        )
    return CancelledRequest(id=request_id)


@router.get("/dashboard/data", include_in_schema=False)
async def get_dashboard_data(request: Request) -> JSONResponse:
    """The figures of the dashboard, without a question to an engine.

    All counters are totals. The page takes the difference of two answers, so the server keeps no history.
    """
    state = state_of(request)
    metrics = state.metrics
    metrics.refresh_statuses()
    now = time.monotonic()
    models = [_model(entry, metrics.models.get(entry.name, ModelFigures())) for entry in state.models.entries]
    data = {
        "version": __version__,
        "time_s": now,  # of a clock that only runs forward
        "uptime_s": now - state.started_at,
        "models": models,
        "rejected": metrics.rejected,
        "num_http_errors": sum(
            count
            for (route, _, status), count in metrics.http.items()
            if status >= 500 and not route.startswith("/health")  # a poll that hears "not yet" is no error
        ),
    }
    return JSONResponse(data)


def _model(model: ModelEntry, figures: ModelFigures) -> dict[str, Any]:
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
        "num_prompt_tokens": figures.num_prompt_tokens,
        "num_cached_tokens": figures.num_cached_tokens,
        "num_generated_tokens": figures.num_generated_tokens,
        "finished": figures.finished,
        "cancelled": figures.cancelled,
        "time_to_first_token": _histogram(figures.totals.time_to_first_token_s),
        "inter_token_latency": _histogram(figures.totals.inter_token_s),
        "e2e_latency": _histogram(figures.totals.e2e_s),
    }


def _histogram(histogram: Histogram) -> dict[str, Any]:
    """Bounds in seconds, and one more count than bounds, not cumulative."""
    return {"bounds": histogram.bounds, "counts": list(histogram.counts)}
