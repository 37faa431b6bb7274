"""A server whose engine is a thread of this process. Everything passed between the two is encoded and decoded.

async with wired_app(EngineConfig(model=path)) as (http, client):
    await http.post("/v1/chat/completions", json={...})
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from octavo.config import EngineConfig
from octavo.core.process_client import ProcessClient
from octavo.core.wire import Submit, decode, decode_request, encode_request
from octavo.engine.answer_stream import MergedStream
from octavo.engine.client import EngineClient
from octavo.engine.texts.prompt_encoder import PromptEncoder
from octavo.generation_request import GenerationRequest
from octavo.server.admission import Admission
from octavo.server.app import create_app
from octavo.server.config import ServerConfig
from octavo.server.models.model_manager import ModelManager
from octavo.server.models.served_adapters import ServedAdapters
from octavo.server.models.served_model import ServedModel
from octavo.server.observability.metrics import ServerMetrics
from octavo.server.observability.observed_client import ObservedClient
from octavo.server.server_state import ServerState
from tests.support.fake_client import read_tokenizer
from tests.support.scripted_server import ReadyLoader


class WiredClient(ProcessClient):
    """A client that records requests.

    requests: requests as they arrive at the engine.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, in_thread=True)
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> MergedStream:
        message = decode(encode_request("request", request))
        assert isinstance(message, Submit)
        self.requests.append(decode_request(message))
        return await super().generate(request)


@asynccontextmanager
async def wired_app(
    config: EngineConfig, server: ServerConfig | None = None, adapters: ServedAdapters | None = None
) -> AsyncIterator[tuple[httpx.AsyncClient, WiredClient]]:
    """Serve every endpoint with the model of `config`, and return an HTTP client and the engine's client."""
    client = WiredClient(config)
    async with app_over(client, config, server, adapters) as http:
        yield http, client


@asynccontextmanager
async def app_over(
    client: EngineClient,
    config: EngineConfig,
    server: ServerConfig | None = None,
    adapters: ServedAdapters | None = None,
) -> AsyncIterator[httpx.AsyncClient]:
    """Serve every endpoint with the engine of a client, which is closed at the end.

    config: configuration of the engine.
    """
    await client.wait_ready()
    prompts = PromptEncoder(read_tokenizer(Path(config.model)), client.info.eos_token_id)
    server, metrics = server or ServerConfig(), ServerMetrics()
    model = ServedModel("model", ObservedClient(client, metrics, "model"), prompts)
    manager = ModelManager({model.name: config}, ReadyLoader(model), adapters=adapters)
    app = create_app(ServerState(config=server, models=manager, admission=Admission(server), metrics=metrics))
    await manager.load(None)
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            yield http
    finally:
        await manager.close()
        prompts.close()
