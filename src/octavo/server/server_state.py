"""The state that all endpoints share: `state_of(request)`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import cast

from fastapi import Request

from octavo.server.admission import Admission
from octavo.server.batch_worker import BatchWorker
from octavo.server.config import ServerConfig
from octavo.server.dashboard import DashboardHistory
from octavo.server.errors import ApiError
from octavo.server.models.model_manager import ModelManager
from octavo.server.models.sleeper import Sleeper
from octavo.server.observability.metrics import ServerMetrics
from octavo.server.response_store import ResponseStore


@dataclass(slots=True, kw_only=True)
class ServerState:
    """The state of one server."""

    config: ServerConfig
    models: ModelManager
    admission: Admission
    metrics: ServerMetrics = field(default_factory=ServerMetrics)
    responses: ResponseStore = field(default_factory=ResponseStore)
    batches: BatchWorker = field(init=False)
    history: DashboardHistory = field(default_factory=DashboardHistory)
    started_at: float = field(default_factory=time.monotonic)
    sleeper: Sleeper = field(init=False)

    def __post_init__(self) -> None:
        self.batches = BatchWorker(self.config.batch_store, self.models, self.responses.salt)
        self.metrics.batches = self.batches.figures
        self.sleeper = Sleeper(self.models, self.config.sleep_after or None, self.config.sleep_level)


def check_may_change_adapters(request: Request) -> bool:
    """Return True if the request has an administrator's key.

    Raises ApiError 403 if it has none and the server does not let everyone load and unload adapters.
    """
    is_admin = bool(getattr(request.state, "is_admin", False))
    if not is_admin and not state_of(request).models.adapters.allows_all:
        message = "loading and unloading adapters needs a key of --admin-key, or a server with --allow-runtime-lora"
        raise ApiError(403, message, code="admin_key_required")
    return is_admin


def state_of(request: Request) -> ServerState:
    """Return the state that `create_app` has stored in `app.state.server`."""
    return cast(ServerState, request.app.state.server)
