"""A deployment of Ray Serve with all routes of `octavo serve`.

from ray import serve
from octavo.ray.serve import openai_app
serve.run(openai_app("smollm2", num_cpus=4, num_replicas=2))
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.config import EngineConfig
from octavo.engine.client import EngineState
from octavo.errors import EngineDeadError, UsageError
from octavo.server.app import create_app
from octavo.server.config import ServerConfig
from octavo.server.models.model_names import served_name, split_names
from octavo.server.models.served_model import ServedModel
from octavo.server.protocols.answering import start_schema_threads
from octavo.server.server_state import ServerState
from octavo.server.startup import build_state, check_exposure

logger = logging.getLogger(__name__)


def openai_app(
    model: str = "smollm2",
    *,
    num_cpus: int = 1,
    num_replicas: int = 1,
    server: ServerConfig | None = None,
    **options: Any,
) -> Any:
    """Return an application for `serve.run`, at the route prefix `/`. Raises UsageError.

    Like `octavo serve`, an application that accepts host names other than localhost (`ServerConfig(host="0.0.0.0")`)
    needs an API key or allow_unauthenticated.

    num_cpus: CPUs that Ray reserves for each replica. Its processes (tensor_parallel_size, pipeline_parallel_size and
        data_parallel_size) share them evenly as threads, unless `num_threads` is among the options.
    server: server options. Ray handles those for the address, TLS and connections.
    options: fields of `EngineConfig`.
    """
    config, rules = _with_threads(EngineConfig.resolve(model, options), num_cpus), server or ServerConfig()
    if rules.sleep_after:
        raise UsageError(
            f"sleep_after is {rules.sleep_after:g}; Ray Serve starts and ends replicas itself: leave it out"
        )
    check_exposure(rules)
    try:
        from ray import serve
    except ImportError:
        raise UsageError("octavo.ray.serve needs ray: pip install 'octavo[ray]'") from None

    def build() -> OpenAIServer:
        return OpenAIServer(config, rules)

    deployment = serve.deployment(
        name="octavo",
        num_replicas=num_replicas,
        ray_actor_options={"num_cpus": num_cpus},
        max_ongoing_requests=config.max_num_seqs + rules.max_queue,
    )
    return deployment(serve.ingress(build)(_Healthy)).bind()


def _with_threads(config: EngineConfig, num_cpus: int) -> EngineConfig:
    """Set the threads of each process of a replica. Raises UsageError if there are more processes than CPUs."""
    processes = config.num_ranks * config.data_parallel_size
    if num_cpus < processes * max(config.num_threads, 1):
        raise UsageError(
            f"num_cpus is {num_cpus}, and each replica has {processes} processes of {config.num_threads or 1} or more "
            "threads: raise it, or lower the number of processes or num_threads"
        )
    return config if config.num_threads else replace(config, num_threads=num_cpus // processes)


class OpenAIServer:
    """An ASGI application that loads its model at the start of its lifespan and unloads it at the end."""

    def __init__(self, config: EngineConfig, server: ServerConfig) -> None:
        self._config, self._server = config, server
        self._state: ServerState | None = None
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        assert self._app is not None  # its lifespan has begun
        await self._app(scope, receive, send)

    def check_health(self) -> None:
        """Raise EngineDeadError if the engine has failed for good."""
        entry = self._state.models.entry(None) if self._state is not None else None
        if entry is not None and entry.model is not None:
            status = entry.model.client.status()
            if status.state is EngineState.DEAD:
                raise EngineDeadError(f"the engine of {entry.name} has ended: {status.reason}")

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            message: Message = await receive()
            try:
                if message["type"] == "lifespan.startup":
                    await self._start()
                else:
                    await self._stop()
            except Exception as error:
                logger.error("%s", error)
                await self._stop()
                await send({"type": f"{message['type']}.failed", "message": str(error)})
                return
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return

    async def _start(self) -> None:
        start_schema_threads()
        self._state = build_state(self._server, {_id_of(self._config, self._server): self._config}, _Quiet())
        self._app = create_app(self._state)
        await self._state.models.load(None)

    async def _stop(self) -> None:
        if self._state is not None:
            await self._state.responses.close()
            await self._state.models.close()


def _id_of(config: EngineConfig, server: ServerConfig) -> str:
    """Return the model's id in requests, as `octavo serve` determines it."""
    return (split_names(",".join(server.alias)) or [served_name(config.model)])[0]


class _Healthy:
    """The class that Ray deploys. Ray checks its health from time to time, and replaces an unhealthy replica."""

    app: OpenAIServer  # set by Ray's wrapper

    def check_health(self) -> None:
        self.app.check_health()


class _Quiet:
    """A load report (`octavo.server.models.model_loader.LoadReport`) that reports nothing."""

    def progress(self, what: str, done: int, total: int) -> None:
        pass

    def phase(self, name: str, seconds: float) -> None:
        logger.info("%s: %.2f s", name, seconds)

    def ready(self, model: ServedModel) -> None:
        pass
