"""From a configuration to a running engine client."""

from __future__ import annotations

from octavo.config import EngineConfig, LoadProgress
from octavo.core.client import EngineClient
from octavo.core.local_client import LocalClient
from octavo.core.process_client import ProcessClient


def start_client(
    config: EngineConfig, *, in_process: bool, stall_timeout_s: float, on_progress: LoadProgress | None = None
) -> EngineClient:
    """Begins to load a model; `EngineClient.wait_ready` says when it is there. Call it from a running event loop.

    in_process: no process of its own for the engine, for debugging. stall_timeout_s: an engine process that makes no
    step for so long while work waits is ended and started again. on_progress: called with (bytes loaded, bytes in all).
    """
    if in_process:
        return LocalClient(config, on_progress)
    return ProcessClient(config, stall_timeout_s=stall_timeout_s, on_progress=on_progress)
