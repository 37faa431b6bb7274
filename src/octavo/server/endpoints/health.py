"""`/health`: the server's liveness and readiness, from state that is already known.

Probes never ask an engine and never wait.
"""

from __future__ import annotations

import os

from fastapi import APIRouter, Request
from pydantic import BaseModel

from octavo.engine.client import EngineState
from octavo.platform import processes
from octavo.server.errors import ApiError
from octavo.server.models.served_model import ServedModel
from octavo.server.server_state import state_of

router = APIRouter(tags=["Health"])

# Error code, and seconds until the next check makes sense.
_PROBLEMS = {
    EngineState.RESTARTING: ("engine_restarting", 2),
    EngineState.STALLED: ("engine_stalled", 5),
    EngineState.DEAD: ("engine_dead", 10),
}


class HealthStatus(BaseModel):
    """Answer to a health probe.

    status: alive, ready or draining. Any other state is an error whose message starts with the state.
    """

    status: str


@router.get("/health/live")
async def live(request: Request) -> HealthStatus:
    """Return 200 while the engines are alive and make progress, even while models are being loaded; otherwise 503."""
    state = state_of(request)
    for entry in state.models.entries:
        if entry.model is not None and entry.state == "loaded":
            _check_engine(entry.model)
    return HealthStatus(status="draining" if state.admission.is_draining else "alive")


@router.get("/health/ready")
async def ready(request: Request) -> HealthStatus:
    """Return 200 if a request would be served now, and 503 while the server is loading, draining or full, or while its
    engine is not working.
    """
    state = state_of(request)
    if state.admission.is_draining:
        raise _problem("draining", "the server is shutting down", "server_shutting_down", 5)
    default = state.models.entry(None)
    if default.state == "loading" or not state.models.has_begun:
        raise _problem("loading", f"{default.name} is being loaded", "model_loading", 2)
    # A model may have been unloaded to make room for another one. It is loaded again on request.
    if default.model is not None and default.state == "loaded":
        _check_engine(default.model)
        if state.admission.is_full(default.model):
            raise _problem("full", "the queue is full", "server_overloaded", 1)
    return HealthStatus(status="ready")


@router.get("/health")
async def health(request: Request) -> HealthStatus:
    """Answer like `/health/ready`."""
    return await ready(request)


def _check_engine(model: ServedModel) -> None:
    """Raise ApiError if the model's engine is not alive or makes no progress."""
    engine = model.client.status()
    if engine.state in _PROBLEMS:
        reason = f"{model.name}: {engine.reason or 'unknown reason'}"
        raise _problem(engine.state.value, reason, *_PROBLEMS[engine.state])
    if engine.pid is not None and engine.pid != os.getpid() and processes.has_exited(engine.pid):
        raise _problem("dead", f"{model.name}: its process {engine.pid} has exited", "engine_restarting", 2)


def _problem(state: str, reason: str, code: str, retry_after_s: int) -> ApiError:
    return ApiError(503, f"{state}: {reason}", code=code, headers={"Retry-After": str(retry_after_s)})
