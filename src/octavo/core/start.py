"""Starts an engine client from a configuration."""

from __future__ import annotations

from octavo.config import EngineConfig, LoadProgress
from octavo.core.client import EngineClient
from octavo.core.local_client import LocalClient
from octavo.core.process_client import ProcessClient


def start_client(
    config: EngineConfig, *, in_process: bool, stall_timeout_s: float, on_progress: LoadProgress | None = None
) -> EngineClient:
    """Starts to load a model; `EngineClient.wait_ready` waits for it. Call it from a running event loop.

    in_process: the engine has no process of its own, for debugging. stall_timeout_s: an engine process without a step
    for this time while work waits is killed and restarted. on_progress: called with (bytes loaded, bytes in all).
    """
    if in_process:
        return LocalClient(config, on_progress)
    return ProcessClient(config, stall_timeout_s=stall_timeout_s, on_progress=on_progress)
