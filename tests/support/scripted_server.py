"""A real HTTP server whose engine answers by script: official clients, synchronous or not, can talk to it.

with scripted_server(model, ["octavo.server.endpoints.tgi"]) as url: ...
"""

from __future__ import annotations

import importlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import uvicorn

from octavo.config import EngineConfig
from octavo.server.admission import Admission
from octavo.server.app import build_app
from octavo.server.config import ServerConfig
from octavo.server.model_manager import ModelManager, ModelSpec
from octavo.server.served_model import ServedModel
from octavo.server.state import ServerState


class ReadyLoader:
    """Loads the one model that is there already. Implements `octavo.server.model_manager.Loader`."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    async def estimate_bytes(self, _spec: ModelSpec) -> int:
        return 0

    async def load(self, _spec: ModelSpec) -> ServedModel:
        return self._model

    async def unload(self, model: ServedModel) -> None:
        await model.client.close()


@asynccontextmanager
async def _loaded(manager: ModelManager) -> AsyncIterator[None]:
    await manager.load(None)
    yield
    await manager.close()


@contextmanager
def scripted_server(model: ServedModel, modules: Sequence[str], config: ServerConfig | None = None) -> Iterator[str]:
    """The address of a server that runs in a thread, with the endpoints of these modules."""
    config = config or ServerConfig()
    manager = ModelManager([ModelSpec(model.name, EngineConfig(model="fake"))], ReadyLoader(model))
    state = ServerState(config=config, models=manager, admission=Admission(config))
    app = build_app(config, [importlib.import_module(name) for name in modules], lambda *_: None)
    app.state.server = state
    app.router.lifespan_context = lambda _: _loaded(manager)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        end = time.monotonic() + 20
        while not server.started and time.monotonic() < end and thread.is_alive():
            time.sleep(0.01)
        assert server.started
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)
