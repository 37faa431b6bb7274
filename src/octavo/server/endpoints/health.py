"""`/health`: the liveness and readiness of the server."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from octavo.server.errors import ApiError
from octavo.server.health import Health, liveness, readiness
from octavo.server.state import state_of

router = APIRouter(tags=["health"])


class HealthStatus(BaseModel):
    """status: alive, ready or draining. Any other state is an error whose message starts with the state."""

    status: str


@router.get("/health/live", response_model=HealthStatus)
async def live(request: Request) -> JSONResponse:
    """200 as long as the engines live and make progress, also while models are loaded; else 503."""
    return _answer(liveness(state_of(request)))


@router.get("/health/ready", response_model=HealthStatus)
async def ready(request: Request) -> JSONResponse:
    """200 if a request would be served now; 503 while the server loads, drains, is full or has lost its engine."""
    return _answer(readiness(state_of(request)))


@router.get("/health", response_model=HealthStatus)
async def health(request: Request) -> JSONResponse:
    """The same as `/health/ready`."""
    return _answer(readiness(state_of(request)))


def _answer(health: Health) -> JSONResponse:
    """The answer to a probe. It is not raised as an error, because the probe itself has not failed."""
    if health.is_ok:
        return JSONResponse({"status": health.state})
    error = ApiError(503, f"{health.state}: {health.reason}", code=health.code)
    return JSONResponse(error.body(), status_code=503, headers={"Retry-After": str(health.retry_after_s)})
