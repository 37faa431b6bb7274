"""`/metrics`: the exposition for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.server.state import state_of

router = APIRouter(tags=["server"])


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def get_metrics(request: Request) -> Response:
    """All metrics, in OpenMetrics's format if the Accept header names it and in Prometheus's own otherwise."""
    metrics = state_of(request).metrics
    await metrics.refresh()
    body, content_type = metrics.export(request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": content_type, "Vary": "Accept"})
