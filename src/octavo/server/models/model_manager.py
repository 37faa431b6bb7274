"""The server's models: loaded at the start or on demand, and unloaded when other models need their memory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

from anyio.to_thread import run_sync

from octavo.config import EngineConfig
from octavo.engine.client import EngineState, ModelInfo
from octavo.engine.loading.model_memory import ModelMemory
from octavo.errors import InsufficientMemoryError, ModelLoadError, OctavoError, OverloadedError, UsageError
from octavo.server.errors import ApiError
from octavo.server.models.model_loader import ModelLoader
from octavo.server.models.model_names import ModelNames
from octavo.server.models.served_adapters import AdapterGiven, ServedAdapter, ServedAdapters
from octavo.server.models.served_model import ServedModel, TokenizerTexts

logger = logging.getLogger(__name__)

_RETRY_LOAD_S = 10.0

ModelState: TypeAlias = Literal["unloaded", "loading", "loaded", "unloading", "sleeping"]


@dataclass(frozen=True, slots=True)
class LoadStatus:
    """Progress of a model that is being loaded.

    done, total: bytes; a total of 0 means unknown
    """

    phase: str
    done: int = 0
    total: int = 0


class _Residency:
    """One period of a model in memory, from the first request for it until it is unloaded."""

    def __init__(self, load: Callable[[_Residency], Coroutine[Any, Any, None]]) -> None:
        self.model: ServedModel | None = None
        self.memory = ModelMemory(0)  # memory that the model takes
        self.awake: ModelMemory | None = None  # memory that it takes when awake, or None if it is not asleep
        self.num_users = 0  # requests that use it or wait for it
        self.last_used = 0
        self.is_leaving = False  # accepts no more users
        self.loading = LoadStatus("waiting for other models")
        self.idle = asyncio.Event()
        self.idle.set()
        self.task = asyncio.create_task(load(self))
        # Waiting requests get the error, so asyncio need not report that it was never retrieved.
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())

    def is_of(self, entry: ModelEntry) -> bool:
        """Return True if this is a residency of the given model."""
        return self.model is not None and self.model.name == entry.name

    def report(self, phase: str, done: int, total: int) -> None:
        """Receive loading progress, from any thread."""
        self.loading = LoadStatus(phase, done, total)

    @contextmanager
    def used(self, turn: int) -> Iterator[None]:
        """While the block runs, count one more request that uses the model or waits for it."""
        self.num_users += 1
        self.last_used = turn
        self.idle.clear()
        try:
            yield
        finally:
            self.num_users -= 1
            if not self.num_users:
                self.idle.set()


class ModelEntry:
    """A model that the server offers, in memory or not."""

    def __init__(self, name: str, config: EngineConfig) -> None:
        self.name = name
        self.config = config
        self.created = int(time.time())
        self.residency: _Residency | None = None  # the latest
        self.info: ModelInfo | None = None  # from the last time that it was loaded
        self.texts: TokenizerTexts | None = None  # likewise
        self.last_error: OctavoError | None = None  # error of the last attempt to load it
        self.failed_at = 0.0

    @property
    def model(self) -> ServedModel | None:
        """The model if it is in memory, even if it is about to be unloaded."""
        return self.residency.model if self.residency is not None else None

    @property
    def is_sleeping(self) -> bool:
        """True if the model was loaded, but the next request has to load or wake it."""
        return self.info is not None and self.state in ("unloaded", "sleeping")

    @property
    def loading(self) -> LoadStatus | None:
        """Loading progress, or None if the model is not being loaded."""
        return self.residency.loading if self.residency is not None and self.residency.model is None else None

    @property
    def state(self) -> ModelState:
        """The model's state for `/v1/models`."""
        if self.residency is None:
            return "unloaded"
        if self.residency.model is None:
            return "loading"
        if self.residency.awake is not None:
            return "sleeping"
        return "unloading" if self.residency.is_leaving else "loaded"


class ModelManager:
    """All models of a server. Belongs to one event loop.

    configs: the models' configurations by id; the first model is loaded at the start
    aliases: additional names -> ids
    limit: memory limit for all loaded models together, or None for no limit
    wait_s: maximum time that a request waits for a model to be loaded
    max_waiting: maximum number of requests that wait for one model
    adapters: the models' adapters, whose names can be used as model names
    """

    def __init__(
        self,
        configs: Mapping[str, EngineConfig],
        loader: ModelLoader,
        *,
        limit: ModelMemory | None = None,
        wait_s: float = 60.0,
        max_waiting: int = 128,
        aliases: Mapping[str, str] | None = None,
        adapters: ServedAdapters | None = None,
    ) -> None:
        self.adapters = ServedAdapters(list(configs)) if adapters is None else adapters
        self._entries = {name: ModelEntry(name, config) for name, config in configs.items()}
        self.names = ModelNames({name: config.model for name, config in configs.items()}, aliases)
        self._loader = loader
        self._limit = limit
        self._wait_s = wait_s
        self._max_waiting = max_waiting
        self._switching = asyncio.Lock()  # one load or unload at a time, because each one depends on the free memory
        self.last_turn = 0  # counts how often models are used
        self._resident: set[_Residency] = set()  # loaded models
        self._unloading: set[asyncio.Task[None]] = set()
        self._leaving: set[asyncio.Task[None]] = set()  # calls of `unload` that nobody waits for
        self.has_begun = False  # whether the first model has been loaded

    @property
    def default_name(self) -> str:
        """The first model's name, for protocols whose requests do not name a model."""
        return next(iter(self._entries))

    @property
    def entries(self) -> list[ModelEntry]:
        """All models, in order."""
        return list(self._entries.values())

    @property
    def is_used(self) -> bool:
        """True while a request uses a model or waits for it."""
        return any(entry.residency is not None and entry.residency.num_users for entry in self.entries)

    @property
    def may_see(self) -> bool:
        """True if a model accepts images, or might once it is loaded."""
        return any(entry.info is None or entry.info.images is not None for entry in self._entries.values())

    def knows(self, name: str) -> bool:
        """Return True if a model or an adapter has this name."""
        return self.names.find(name) is not None or self.adapters.find(name) is not None

    def adapter(self, name: str | None) -> ServedAdapter | None:
        """Return the adapter with this name, or None if there is none or if a model has the name."""
        return None if name is None or self.names.find(name) is not None else self.adapters.find(name)

    def shown_name(self, name: str | None) -> str:
        """Return the id that answers show for a name. Raises ApiError (404 model_not_found)."""
        adapter = self.adapter(name)
        return self.entry(name).name if adapter is None else adapter.name

    def entry(self, name: str | None) -> ModelEntry:
        """Return a model by any of its names or by an adapter's name, or the first model if the name is None.

        Raises ApiError (404 model_not_found).
        """
        found = self.default_name if name is None else self.names.find(name)
        if found is None and (adapter := self.adapter(name)) is not None:
            found = adapter.parent
        if found is None:
            names = ", ".join([*self._entries, *(adapter.name for adapter in self.adapters.entries)])
            message = f"there is no model {name!r:.100}; available: {names}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return self._entries[found]

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[ServedModel]:
        """Yield the model, loaded if needed and kept in memory until the block ends.

        name: the name of a model or of an adapter, or None for the only model. For an adapter's name, the yielded model
        has that adapter. For a model's name, it has the adapter that is applied to the model, if any.

        Raises UsageError for None if there are several models, ApiError (404 model_not_found), OverloadedError
        (model_loading) while the server starts or if loading takes too long, or the error that prevented loading.
        """
        if name is None and len(self._entries) > 1:
            message = f"the request names no model; available: {', '.join(self._entries)}"
            raise UsageError(message, param="model", code="missing_required_parameter")
        entry = self.entry(name)
        if not self.has_begun:
            raise OverloadedError("the model is being loaded", code="model_loading", retry_after_s=2.0)
        if entry.last_error is not None and time.monotonic() - entry.failed_at < _RETRY_LOAD_S:
            raise entry.last_error  # a broken model must not keep all others waiting
        residency = self._residency(entry)
        if residency.model is None and residency.num_users >= self._max_waiting:
            raise OverloadedError(
                f"{residency.num_users} requests are already waiting for {entry.name} to load, the limit",
                code="model_loading",
                retry_after_s=10.0,
            )
        adapter = self.adapter(name)
        with residency.used(self._next_turn()):
            model = await self._loaded(entry, residency, self._wait_s)
            if adapter is not None:
                model = replace(model, name=adapter.name, adapter=adapter)
            elif (applied := self.adapters.applied_to(entry.name)) is not None:
                model = replace(model, adapter=applied)
            yield model

    async def load(self, name: str | None) -> None:
        """Load a model if needed, without a time limit. Raises the same errors as `use`."""
        entry = self.entry(name)
        residency = self._residency(entry)
        with residency.used(self._next_turn()):
            await self._loaded(entry, residency)
            self.has_begun = True

    async def unload(self, name: str | None) -> None:
        """Unload a model once its requests have finished; a later request loads it again."""
        residency = self.entry(name).residency
        if residency is None:
            return
        residency.is_leaving = True
        await asyncio.wait({residency.task})
        await residency.idle.wait()  # meanwhile, other models are loaded and unloaded
        async with self._switching:
            await self._remove(residency)

    async def sleep(self, name: str) -> None:
        """Free a model's device memory once its requests have finished. Its weights stay in main memory.

        A model that cannot do this, such as one without a device, is unloaded.
        """
        residency = self.entry(name).residency
        if residency is None:
            return
        await asyncio.wait({residency.task})
        while residency.model is not None and residency.awake is None and not residency.is_leaving:
            await residency.idle.wait()
            async with self._switching:
                if residency.num_users or residency.is_leaving:
                    continue
                residency.awake = residency.memory  # from now on, a new request wakes it up
                try:
                    await residency.model.client.sleep()
                    residency.memory = ModelMemory(residency.memory.main + residency.memory.device)
                except OctavoError as error:
                    residency.awake = None
                    logger.info("%s is unloaded: %s", name, error)
                    residency.is_leaving = True
                    await self._remove(residency)

    async def _wake_up(self, entry: ModelEntry, residency: _Residency) -> None:
        async with self._switching:
            if residency.awake is not None and residency.model is not None:
                residency.memory = residency.awake
                await self._make_room(residency, entry.name)
                await residency.model.client.wake_up()
                residency.awake = None

    def _next_turn(self) -> int:
        self.last_turn += 1
        return self.last_turn

    async def load_adapter(self, given: AdapterGiven, owner: str | None, *, replaces: bool = False) -> ServedAdapter:
        """Find an adapter, download it if needed, read it and register its name.

        owner: see `ServedAdapter`

        Raises UsageError, ApiError, or ModelLoadError that names the part that does not fit the model.
        """
        path = await run_sync(self.adapters.locate, given.source)
        self.adapters.check(given, path, owner, replaces=replaces)
        async with self.use(given.parent or self.default_name) as model:
            adapter = self.adapters.new(given, path, owner)
            await model.client.add_adapter(adapter.engine_name, str(path), adapter.scale)
        self.adapters.check(given, path, owner, replaces=replaces)  # another request may have loaded one meanwhile
        old = self.adapters.put(adapter)
        if old is not None:
            await self._forget(old)
        return adapter

    async def unload_adapter(self, name: str) -> None:
        """Remove an adapter; running requests keep it. Raises ApiError 404."""
        await self._forget(self.adapters.remove(name))

    async def _forget(self, adapter: ServedAdapter) -> None:
        model = self._entries[adapter.parent].model
        if model is not None and model.client.status().state is EngineState.READY:
            await model.client.remove_adapter(adapter.engine_name)

    def unload_soon(self, name: str | None) -> None:
        """Start unloading a model like `unload`, without waiting for its requests."""
        task = asyncio.create_task(self.unload(name), name="unload soon")
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        """Stop all engines, even those in use. Calling this twice is allowed."""
        tasks = [entry.residency.task for entry in self.entries if entry.residency is not None]
        tasks += self._leaving
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for residency in list(self._resident):
            self._resident.discard(residency)
            if residency.model is not None:
                await self._loader.unload(residency.model)
        if self._unloading:
            await asyncio.wait(self._unloading)
        for entry in self.entries:
            entry.residency = None

    def _residency(self, entry: ModelEntry) -> _Residency:
        """Return the residency that a new request joins. Start a new one if there is none or the last one is ending."""
        residency = entry.residency
        if residency is not None and residency.model is not None and not residency.is_leaving:
            # An engine that has been given up on is unloaded like an idle one.
            residency.is_leaving = residency.model.client.status().state is EngineState.DEAD
        if residency is None or residency.is_leaving:
            residency = entry.residency = _Residency(partial(self._bring_in, entry))
        return residency

    async def _loaded(self, entry: ModelEntry, residency: _Residency, wait_s: float | None = None) -> ServedModel:
        """Wait until the model is loaded, and return it.

        wait_s: time limit, or None for no limit

        Raises the error that prevented loading.
        """
        task = residency.task
        if residency.model is None:
            await asyncio.wait({task}, timeout=wait_s)
            if task.cancelled():
                raise OverloadedError("the server is shutting down", code="server_shutting_down", retry_after_s=5.0)
            if task.done():
                task.result()  # raises the task's error
        if residency.model is None:
            raise OverloadedError(f"{entry.name} is still being loaded", code="model_loading", retry_after_s=10.0)
        if residency.awake is not None:
            try:
                await asyncio.wait_for(self._wake_up(entry, residency), wait_s)
            except asyncio.TimeoutError:
                raise OverloadedError(f"{entry.name} sleeps", code="model_loading", retry_after_s=10.0) from None
        return residency.model

    async def _bring_in(self, entry: ModelEntry, residency: _Residency) -> None:
        """Load the model of a new residency, unloading other models if there is no room."""
        try:
            for earlier in [one for one in self._resident if one.is_of(entry)]:
                await earlier.idle.wait()
            async with self._switching:
                if not residency.num_users:
                    raise asyncio.CancelledError  # no request waits for the model any more
                residency.loading = LoadStatus("looking for its files")
                held = _memory_of(one for one in self._resident if not one.is_leaving)
                residency.memory = await self._loader.estimate(entry.name, entry.config, held, residency.report)
                residency.loading = LoadStatus("waiting for memory")
                await self._make_room(residency, entry.name)
                residency.loading = LoadStatus("starting its engine")
                began = time.monotonic()
                residency.model = await self._loader.load(entry.name, entry.config, residency.report)
                self._resident.add(residency)
                for adapter in self.adapters.of(entry.name):
                    await self._add_adapter(residency.model, adapter)
                logger.info("loaded %s in %.2f s", entry.name, time.monotonic() - began)
                entry.info, entry.texts = residency.model.info, residency.model.texts
                entry.last_error = None
        except BaseException as error:
            residency.is_leaving = True
            if entry.residency is residency:
                entry.residency = None
            if isinstance(error, OctavoError):
                entry.last_error, entry.failed_at = error, time.monotonic()
                if self.has_begun:  # before that, the server's startup reports it
                    logger.warning("%s cannot be loaded: %s", entry.name, error)
            raise

    async def _add_adapter(self, model: ServedModel, adapter: ServedAdapter) -> None:
        """Register an adapter with a new engine.

        While the server starts, an unreadable adapter is fatal. Later, only requests that name it fail.
        """
        try:
            await model.client.add_adapter(adapter.engine_name, str(adapter.path), adapter.scale)
        except (ModelLoadError, UsageError) as error:
            if not self.has_begun:
                raise
            logger.warning("the adapter %s cannot be loaded: %s", adapter.name, error)

    async def _make_room(self, newcomer: _Residency, name: str) -> None:
        """Unload models, idle and least recently used ones first, until there is room for the new model.

        Raises InsufficientMemoryError if the new model does not fit even alone.
        """
        for ended in [one for one in self._resident if one.is_leaving and not one.num_users]:
            await self._remove(ended)
        if self._limit is None:
            return
        if not newcomer.memory.fits(self._limit):
            raise InsufficientMemoryError(
                f"{name} needs {newcomer.memory}, but models_memory is {self._limit}; raise it, or lower "
                "kv_cache_memory or max_model_len"
            )
        while not (_memory_of(others := self._resident - {newcomer}) + newcomer.memory).fits(self._limit):
            victim = min(others, key=lambda one: (one.num_users > 0, not one.is_leaving, one.last_used))
            victim.is_leaving = True
            await self._remove(victim)

    async def _remove(self, residency: _Residency) -> None:
        """Unload a model after its last request."""
        await residency.idle.wait()
        model = residency.model
        if model is not None and residency in self._resident:
            self._resident.discard(residency)
            unloading = asyncio.create_task(self._loader.unload(model), name=f"unload {model.name}")
            self._unloading.add(unloading)
            unloading.add_done_callback(self._unloading.discard)
            await asyncio.shield(unloading)  # the request that needs the memory may give up; the engine must end anyway
            residency.model = None  # its client reports here, and this cycle would keep its tokenizer alive
            logger.info("unloaded %s", model.name)
        for entry in self.entries:
            if entry.residency is residency:
                entry.residency = None


def _memory_of(residencies: Iterable[_Residency]) -> ModelMemory:
    return sum((one.memory for one in residencies), ModelMemory(0))
