"""`/health`: whether the server lives, and whether it can serve now."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from octavo.server.health import Health, liveness, readiness
from octavo.server.state import state_of

router = APIRouter(tags=["health"])


@router.get("/health/live")
async def live(request: Request) -> JSONResponse:
    """200 as long as the engines live and make progress, also while models are loaded; else 503."""
    return _answer(liveness(state_of(request)))


@router.get("/health/ready")
async def ready(request: Request) -> JSONResponse:
    """200 if a request would be served now; 503 while the server loads, drains, is full or has lost its engine."""
    return _answer(readiness(state_of(request)))


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """The same as `/health/ready`."""
    return _answer(readiness(state_of(request)))


def _answer(health: Health) -> JSONResponse:
    if health.is_ok:
        return JSONResponse({"status": health.state})
    error = {"message": health.reason, "type": "server_error", "param": None, "code": health.code}
    return JSONResponse(
        {"status": health.state, "reason": health.reason, "error": error},
        status_code=503,
        headers={"Retry-After": str(health.retry_after_s)},
    )
