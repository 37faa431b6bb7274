"""The life cycle of a server: listen, load, serve, drain."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
import socket
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import anyio
from starlette.types import ASGIApp

from octavo import env
from octavo.config import EngineConfig, parse_bytes
from octavo.core.heap import return_large_blocks
from octavo.engine.client import EngineState
from octavo.engine.loading.model_memory import MemoryShares, machine_memory
from octavo.errors import InsufficientMemoryError, OctavoError, UsageError
from octavo.platform import files
from octavo.server.admission import Admission
from octavo.server.app import create_app
from octavo.server.config import ServerConfig
from octavo.server.http.access import configured_keys, is_loopback
from octavo.server.http.listener import serve
from octavo.server.models.model_loader import LoadReport, ModelLoader
from octavo.server.models.model_manager import ModelManager
from octavo.server.models.model_names import read_aliases
from octavo.server.models.served_adapters import AdapterGiven, AdapterQuota, ServedAdapters
from octavo.server.observability.metrics import ServerMetrics
from octavo.server.observability.tracing import start_tracer
from octavo.server.protocols.answering import start_schema_threads
from octavo.server.response_store import ResponseStore
from octavo.server.server_state import ServerState

logger = logging.getLogger(__name__)

_WATCH_S = 0.25


class MemoryLimitError(OctavoError):
    """The model does not fit into memory, so the server cannot start."""

    exit_code = 4


class RestartLimitError(OctavoError):
    """The only engine died too many times to be restarted again."""

    exit_code = 5


def check_exposure(config: ServerConfig) -> None:
    """Raise UsageError if the server would be open to the network without a key. Warn about keys that others can read,
    and about connections without encryption.
    """
    has_keys, path = bool(configured_keys(config)), config.api_key_file
    if path is not None and files.permissions(Path(path).stat()) & stat.S_IROTH:
        logger.warning("--api-key-file %s can be read by every user of this machine; run chmod 600 %s", path, path)
    if is_loopback(config.host):
        return
    if not has_keys:
        if not config.allow_unauthenticated:
            raise UsageError(
                f"--host {config.host} can be reached from other machines, and there is no key, so anyone there could "
                "use the model; give --api-key, --api-key-file or --allow-unauthenticated"
            )
        logger.warning("%s can be reached from other machines and requires no key", config.host)
    if config.ssl_certfile is None:
        logger.warning(
            "%s can be reached from other machines without encryption: prompts, answers and keys can be read on the "
            "way; give --ssl-certfile, or put a proxy with TLS in front",
            config.host,
        )


def build_state(config: ServerConfig, models: Mapping[str, EngineConfig], report: LoadReport) -> ServerState:
    """Build the parts of a server. Call this from a running event loop."""
    adapters = _adapters(config, models)
    # The server loads adapters into its engines, including engines that start later.
    models = {name: dataclasses.replace(each, lora_modules=None) for name, each in models.items()}
    responses = ResponseStore(config.response_store)
    metrics = ServerMetrics(config.metrics_prefix, tracer=start_tracer(config.otlp_endpoint))
    metrics.max_loras = max((each.max_loras for each in models.values() if each.takes_adapters), default=0)
    metrics.adapter_bytes = lambda: {adapter.name: adapter.nbytes for adapter in adapters.entries}
    shares = None
    if config.models_memory_bytes is not None or len(models) > 1:  # asking for GPU memory loads torch into this process
        machine = machine_memory(next(iter(models.values())))
        shares = MemoryShares.of(machine, config.models_memory_bytes, len(models))
    manager = ModelManager(
        models,
        ModelLoader(config, metrics, report, shares),
        limit=None if shares is None else shares.limit,
        wait_s=config.queue_timeout,
        max_waiting=max(config.max_queue, 1),
        aliases=read_aliases(config.alias, list(models)),
        adapters=adapters,
    )
    admission = Admission(config, len(set(configured_keys(config))))
    return ServerState(config=config, models=manager, admission=admission, metrics=metrics, responses=responses)


def _adapters(config: ServerConfig, models: Mapping[str, EngineConfig]) -> ServedAdapters:
    """Return the adapters in the options. Raises UsageError, or ModelLoadError for an adapter without files."""
    quota = AdapterQuota(config.lora_quota, parse_bytes("lora_quota_bytes", config.lora_quota_bytes))
    folder = None if config.lora_dir is None else env.user_path(config.lora_dir)
    if folder is not None and not folder.is_dir():
        raise UsageError(f"lora_dir is {config.lora_dir!r}, but there is no such folder")
    adapters = ServedAdapters(list(models), folder=folder, quota=quota, allows_all=config.allow_runtime_lora)
    for model, engine in models.items():
        for name, (source, scale) in engine.adapters.items():
            given = AdapterGiven(name, source, model, scale)
            path = adapters.locate(source)
            adapters.check(given, path, None)
            adapters.put(adapters.new(given, path))
    return adapters


async def run_server(
    config: ServerConfig, models: Mapping[str, EngineConfig], sock: socket.socket, report: LoadReport
) -> None:
    """Serve until a signal arrives. HTTP requests are answered from the start, while the first model loads.

    Raises KeyboardInterrupt if SIGINT came before the server was ready, the error that prevented the first model from
    loading, MemoryLimitError, or RestartLimitError.
    """
    return_large_blocks()
    start_schema_threads()
    state = build_state(config, models, report)
    app = create_app(state)
    lifetime = _Lifetime(state, app)
    serving = asyncio.create_task(serve(app, config, sock, on_drain=lifetime.drain))
    living = asyncio.create_task(lifetime.live(report))
    recording = asyncio.create_task(state.history.record(state))
    try:
        await asyncio.wait({serving, living}, return_when=asyncio.FIRST_COMPLETED)
        if living.done():
            living.result()  # raises the task's error
        await serving
        if lifetime.was_interrupted:
            raise KeyboardInterrupt
    except InsufficientMemoryError as error:
        raise MemoryLimitError(str(error)) from error
    finally:
        for task in (recording, living, serving):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
        await state.batches.close()
        await state.sleeper.close()
        await state.responses.close()
        await state.models.close()
        if state.metrics.tracer is not None:
            await state.metrics.tracer.close()


class _Lifetime:
    """Tasks that run alongside the web server."""

    def __init__(self, state: ServerState, app: ASGIApp) -> None:
        self._state = state
        self._app = app
        self._is_loaded = False
        self.was_interrupted = False

    async def live(self, report: LoadReport) -> None:
        """Load the first model and watch its engine. Never returns; raises the error that ends the server."""
        models = self._state.models
        await models.load(None)
        self._is_loaded = True
        async with models.use(models.default_name) as model:
            report.ready(model)
        del model  # the first model may be unloaded, and this function never returns
        self._state.batches.start(self._app)
        while True:
            await asyncio.sleep(_WATCH_S)
            self._state.sleeper.watch(self._state.admission.num_requests)
            [only, *others] = models.entries
            if not others and only.model is not None and only.state == "loaded":
                engine = only.model.client.status()
                if engine.state is EngineState.DEAD:
                    raise RestartLimitError(f"the engine of {only.name} has ended: {engine.reason}")

    async def drain(self, number: signal.Signals) -> None:
        """Refuse new requests, and wait a limited time for the admitted ones to end."""
        admission, seconds = self._state.admission, self._state.config.drain
        admission.is_draining = True
        await self._state.batches.stop()
        if not self._is_loaded:
            self.was_interrupted = number is signal.SIGINT
            return
        if admission.num_requests:
            text = "%s: shutting down; %d running requests have %g s to finish, a second signal ends them at once"
            logger.info(text, number.name, admission.num_requests, seconds)
        else:
            logger.info("%s: shutting down", number.name)
        with anyio.move_on_after(seconds) as limit:
            await admission.wait_idle()
        if limit.cancelled_caught:
            logger.warning("%d requests were not finished within %g s", admission.num_requests, seconds)
