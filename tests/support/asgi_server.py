"""The whole application in this process, without a socket, with models whose engines give scripted answers.

async with asgi_client(ServerConfig(), [model]) as (client, state): ...
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx

from octavo.config import EngineConfig, LoadProgress
from octavo.engine.loading.model_memory import ModelMemory
from octavo.server.admission import Admission
from octavo.server.app import create_app
from octavo.server.config import ServerConfig
from octavo.server.models.model_manager import ModelManager
from octavo.server.models.served_model import ServedModel
from octavo.server.observability.metrics import ServerMetrics
from octavo.server.server_state import ServerState


class ReadyLoader:
    """A fake `ModelLoader` whose models are already loaded."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = {model.name: model for model in models}

    async def estimate(
        self, _name: str, _config: EngineConfig, _held: ModelMemory, _progress: LoadProgress
    ) -> ModelMemory:
        return ModelMemory(0)

    async def load(self, name: str, _config: EngineConfig, _progress: LoadProgress) -> ServedModel:
        return self._models[name]

    async def unload(self, model: ServedModel) -> None:
        await model.client.close()


@asynccontextmanager
async def asgi_client(
    config: ServerConfig, models: Sequence[ServedModel], *, loaded: bool = True
) -> AsyncIterator[tuple[httpx.AsyncClient, ServerState]]:
    """Open a client of an application with these models.

    loaded: the first model is already loaded.
    """
    manager = ModelManager({model.name: EngineConfig(model=model.name) for model in models}, ReadyLoader(models))
    state = ServerState(config=config, models=manager, admission=Admission(config), metrics=ServerMetrics())
    if loaded:
        await manager.load(None)
    transport = httpx.ASGITransport(app=create_app(state))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client, state
    finally:
        await manager.close()
