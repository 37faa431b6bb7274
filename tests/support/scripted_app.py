"""The whole application with a scripted engine, on a real port: pages, metrics and traces without a model.

with scripted_app(FakeClient(tokenizer, Script(["Hel", "lo"])), tokenizer) as server:
    httpx.get(server.url + "/metrics")
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn

from octavo.config import EngineConfig, LoadProgress
from octavo.engine.client import EngineClient
from octavo.engine.loading.model_memory import ModelMemory
from octavo.errors import OctavoError
from octavo.server.admission import Admission
from octavo.server.app import create_app
from octavo.server.config import ServerConfig
from octavo.server.models.model_manager import ModelManager
from octavo.server.models.served_model import ServedModel
from octavo.server.observability.metrics import ServerMetrics
from octavo.server.observability.observed_client import ObservedClient
from octavo.server.observability.tracing import start_tracer
from octavo.server.server_state import ServerState
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import FakeClient, fake_model
from tests.support.scripted_server import ReadyLoader
from tests.support.waiting import wait_until, wait_until_async


@dataclass(frozen=True)
class ScriptedApp:
    url: str
    metrics: ServerMetrics
    client: EngineClient
    state: ServerState


class SteppedLoader:
    """A fake `ModelLoader` that loads scripted models as slowly as the test wants.

    It reports 3 of 8 bytes packed, then waits for `may_end`.

    problem: error to raise after that.
    """

    def __init__(self, tokenizer: Tokenizer, client: FakeClient) -> None:
        self._tokenizer = tokenizer
        self._client = client
        self.may_end = threading.Event()
        self.problem: OctavoError | None = None

    async def estimate(
        self, _name: str, _config: EngineConfig, _held: ModelMemory, _progress: LoadProgress
    ) -> ModelMemory:
        return ModelMemory(0)

    async def load(self, name: str, _config: EngineConfig, progress: LoadProgress) -> ServedModel:
        progress("packing", 3, 8)
        await wait_until_async(self.may_end.is_set, seconds=600)
        if self.problem is not None:
            raise self.problem
        return fake_model(self._tokenizer, self._client, name=name)

    async def unload(self, model: ServedModel) -> None:
        model.prompts.close()


@contextmanager
def scripted_app(
    client: FakeClient,
    tokenizer: Tokenizer,
    config: ServerConfig | None = None,
    *,
    names: tuple[str, ...] = ("scripted",),
    loader: SteppedLoader | None = None,
) -> Iterator[ScriptedApp]:
    """Run a server in a thread, with every endpoint.

    names: names of its models, which all answer by the same script.
    loader: None loads the first model before the server runs.
    """
    config = config or ServerConfig()
    metrics = ServerMetrics(config.metrics_prefix, tracer=start_tracer(config.otlp_endpoint))
    observed = ObservedClient(client, metrics, names[0])
    model = fake_model(tokenizer, observed, name=names[0])
    manager = ModelManager({name: EngineConfig(model="fake") for name in names}, loader or ReadyLoader(model))
    state = ServerState(config=config, models=manager, admission=Admission(config), metrics=metrics)
    app = create_app(state)

    with socket.socket(proto=socket.IPPROTO_TCP) as listener:  # without it asyncio leaves Nagle on: 40 ms an answer
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1, lifespan="off"))

        async def serve() -> None:
            loading = asyncio.create_task(manager.load(None))
            if loader is None:
                await loading
            await server.serve(sockets=[listener])
            await manager.close()
            if metrics.tracer is not None:
                await metrics.tracer.close()

        thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
        thread.start()
        wait_until(lambda: server.started or not thread.is_alive())
        assert server.started
        try:
            yield ScriptedApp(f"http://127.0.0.1:{listener.getsockname()[1]}", metrics, observed, state)
        finally:
            server.should_exit = True
            thread.join(10)
