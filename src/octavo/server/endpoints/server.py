"""Routes about the server itself: `/version`, `/load`, `/metrics` for Prometheus, `/dashboard/data`, and cancelling
requests.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from octavo import __version__
from octavo.server.dashboard import snapshot
from octavo.server.errors import ApiError
from octavo.server.observability.exposition import export
from octavo.server.server_state import state_of

router = APIRouter()


class Version(BaseModel):
    version: str


class Load(BaseModel):
    """The server's load, in vLLM's form.

    server_load: number of running and waiting requests
    """

    server_load: int


@router.get("/version", tags=["Server"])
async def get_version() -> Version:
    """Return the server's version."""
    return Version(version=__version__)


@router.get("/load", tags=["Server"])
async def get_load(request: Request) -> Load:
    """Return the number of requests in the server, in vLLM's form."""
    return Load(server_load=state_of(request).admission.num_requests)


@router.get("/metrics", tags=["Server"], response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def get_metrics(request: Request) -> Response:
    """Return all metrics, in OpenMetrics format if the Accept header names it, otherwise in Prometheus's text
    format.
    """
    metrics = state_of(request).metrics
    await metrics.refresh()
    body, content_type = export(metrics, request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": content_type, "Vary": "Accept"})


class CancelledRequest(BaseModel):
    """Confirmation that a request has been cancelled."""

    id: str
    object: str = "request"
    cancelled: bool = True


@router.post("/v1/requests/{request_id}/cancel", tags=["Requests"])
async def cancel_request(request: Request, request_id: str) -> CancelledRequest:
    """End a running or waiting request of the same API key, identified by its `x-request-id` header.

    The cancelled request gets 499 `request_cancelled`, as its status or as the last event of its stream.
    """
    if not state_of(request).admission.cancel(request_id, request.state.tenant):
        raise ApiError(
            404, f"there is no running request {request_id!r:.80}", param="request_id", code="request_not_found"
        )
    return CancelledRequest(id=request_id)


@router.get("/dashboard/data", include_in_schema=False)
async def get_dashboard_data(request: Request, history: bool = False) -> JSONResponse:
    """Return the dashboard's figures, without asking an engine.

    All counters are totals; the page subtracts consecutive answers. With `history`, the answer includes the last 15
    minutes.
    """
    state = state_of(request)
    data = snapshot(state)
    return JSONResponse({**data, "history": state.history.samples} if history else data)
