"""A real HTTP server whose engine gives scripted answers, for official clients, synchronous or not.

with scripted_server(tokenizer, "tgi") as server:
    server.script = Script(["Hel", "lo"])
"""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from octavo.config import EngineConfig, LoadProgress
from octavo.engine.loading.model_memory import ModelMemory
from octavo.generation_request import GenerationRequest
from octavo.server.admission import Admission
from octavo.server.app import build_app, route_modules
from octavo.server.config import ServerConfig
from octavo.server.models.image_reader import ImageReader
from octavo.server.models.model_manager import ModelManager
from octavo.server.models.served_model import ServedModel
from octavo.server.server_state import ServerState
from octavo.server.tool_parsers.tool_format import find_tool_format
from octavo.tokenizer.template_set import TemplateSet
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import FakeClient, Script, fake_model
from tests.support.waiting import wait_until


class ReadyLoader:
    """A fake `ModelLoader` whose only model is already loaded."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    async def estimate(
        self, _name: str, _config: EngineConfig, _held: ModelMemory, _progress: LoadProgress
    ) -> ModelMemory:
        return ModelMemory(0)

    async def load(self, _name: str, _config: EngineConfig, _progress: LoadProgress) -> ServedModel:
        return self._model

    async def unload(self, model: ServedModel) -> None:
        await model.client.close()


@dataclass
class ScriptedServer:
    """A server with scripted answers.

    script: the answer to every following request, or a function from the request to its answer.
    """

    url: str
    client: FakeClient
    http: httpx.Client
    config: ServerConfig

    @property
    def script(self) -> Script | Callable[[GenerationRequest], Script]:
        return self.client.script

    @script.setter
    def script(self, script: Script | Callable[[GenerationRequest], Script]) -> None:
        self.client.script = script

    @property
    def last_request(self) -> GenerationRequest:
        """The last request that reached the engine."""
        return self.client.requests[-1]

    def post(self, path: str, body: object) -> httpx.Response:
        return self.http.post(path, json=body)

    def get(self, path: str) -> httpx.Response:
        return self.http.get(path)


@contextmanager
def scripted_server(
    tokenizer: Tokenizer, *families: str, config: ServerConfig | None = None, **client_fields: Any
) -> Iterator[ScriptedServer]:
    """Run a server in a thread, with the routes of these protocols and endpoints.

    client_fields: fields of `FakeClient`.
    """
    client = FakeClient(tokenizer, **{"max_model_len": 1024, **client_fields})
    config = config or ServerConfig()
    tool_format = find_tool_format(tokenizer.template_source(has_tools=True))
    model = fake_model(tokenizer, client, tool_format=tool_format)
    model = dataclasses.replace(model, images=ImageReader(config))
    manager = ModelManager({model.name: EngineConfig(model="fake")}, ReadyLoader(model))
    # octavo.server.protocols.FAMILY.routes, octavo.server.endpoints.FAMILY
    modules = [module for module in route_modules() if module.__name__.split(".")[3] in families]
    app = build_app(config, modules, lambda *_: None, may_see=lambda: manager.may_see)
    app.state.server = ServerState(config=config, models=manager, admission=Admission(config))
    with socket.socket(proto=socket.IPPROTO_TCP) as listener:  # without it asyncio leaves Nagle on: 40 ms an answer
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1, lifespan="off"))

        async def serve() -> None:
            await manager.load(None)
            await server.serve(sockets=[listener])
            await manager.close()
            await app.state.server.batches.close()

        thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
        thread.start()
        wait_until(lambda: server.started or not thread.is_alive())
        assert server.started
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            with httpx.Client(base_url=url, verify=False, timeout=20) as http:
                yield ScriptedServer(url, client, http, config)
        finally:
            server.should_exit = True
            thread.join(20)
            model.prompts.close()
            model.images.close()


def with_template(tokenizer: Tokenizer, chat_template: str) -> Tokenizer:
    """Return the same vocabulary with another chat template."""
    return dataclasses.replace(tokenizer, chat_template=TemplateSet(chat_template))


def with_infill(tokenizer: Tokenizer) -> Tokenizer:
    """Return SmolLM2's vocabulary with fill-in-the-middle tokens in place of some others."""
    names = {"<gh_stars>": "<fim_prefix>", "<issue_start>": "<fim_suffix>", "<issue_comment>": "<fim_middle>"}
    return dataclasses.replace(tokenizer, tokens=[names.get(token, token) for token in tokenizer.tokens])


THINKING_TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>
{% endif %}{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
