"""`/health`: the liveness and readiness of the server.

They come from state that is already known: a probe asks no engine and never waits.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from octavo.core.client import EngineState, EngineStatus
from octavo.server.errors import ApiError
from octavo.server.state import ServerState, state_of

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


@dataclass(frozen=True, slots=True)
class Health:
    """code, reason: the problem, if there is one. retry_after_s: seconds until the next check is useful."""

    is_ok: bool
    state: str
    code: str | None = None
    reason: str | None = None
    retry_after_s: int = 1


def liveness(state: ServerState) -> Health:
    """Liveness: every engine is alive and makes progress. A loading or draining server is alive."""
    for model in state.models.statuses():
        if model.model is not None and model.state == "loaded":
            health = _engine_health(model.name, model.model.client.status())
            if not health.is_ok:
                return health
    return Health(True, "draining" if state.admission.is_draining else "alive")


def readiness(state: ServerState) -> Health:
    """Readiness: a request that names no model would be served now."""
    if state.admission.is_draining:
        return Health(False, "draining", "server_shutting_down", "the server is shutting down", 5)
    default = state.models.status(None)
    if default.state == "loading" or not state.models.has_begun:
        return Health(False, "loading", "model_loading", f"{default.name} is being loaded", 2)
    if default.model is None or default.state == "unloading":
        # Several models: this one made room for another, and is loaded again when it is asked for.
        return Health(True, "ready")
    health = _engine_health(default.name, default.model.client.status())
    if health.is_ok and state.admission.is_full(default.model):
        return Health(False, "full", "server_overloaded", "the queue is full")
    return Health(True, "ready") if health.is_ok else health


def _engine_health(name: str, engine: EngineStatus) -> Health:
    reason = f"{name}: {engine.reason or 'unknown reason'}"
    if engine.state is EngineState.RESTARTING:
        return Health(False, "restarting", "engine_restarting", reason, 2)
    if engine.state is EngineState.STALLED:
        return Health(False, "stalled", "engine_stalled", reason, 5)
    if engine.state is EngineState.DEAD:
        return Health(False, "dead", "engine_dead", reason, 10)
    if engine.pid is not None and engine.pid != os.getpid() and _is_gone(engine.pid):
        return Health(False, "dead", "engine_restarting", f"{name}: its process {engine.pid} has exited", 2)
    return Health(True, "alive")


def _is_gone(pid: int) -> bool:
    """True if a process has exited, even if its exit status has not been collected yet."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in {"Z", "X"}
    return True
