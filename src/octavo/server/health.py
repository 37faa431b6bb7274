"""The server's health, from state that is already known: it asks no engine and never waits."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from octavo.core.client import EngineState, EngineStatus
from octavo.server.state import ServerState


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
