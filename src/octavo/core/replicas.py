"""Several engines of one model behind one client: routing, requests that outlive their replica, restarts one by one."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

from octavo.config import EngineConfig, LoadProgress
from octavo.core.process_client import ProcessClient
from octavo.core.router import RoutedPrompt, Router, Visit
from octavo.core.supervisor import settled
from octavo.engine.answer_stream import MergedStream
from octavo.engine.client import EngineState, EngineStatus, ModelInfo, refusal
from octavo.engine.metrics import EngineMetrics
from octavo.engine.slots import SlotAction, SlotReport
from octavo.errors import EngineDeadError, OctavoError, OverloadedError, UsageError
from octavo.generation_request import GenerationRequest
from octavo.outputs import OutputDelta, PoolingOutput

logger = logging.getLogger(__name__)

_POLL_S = 0.02
_SUMS = ("max_num_seqs", "num_blocks", "kv_cache_bytes", "weight_bytes", "workspace_bytes", "num_threads")
# Of several engines, the state of the best: one is enough to serve.
_BEST_FIRST = (
    EngineState.READY,
    EngineState.STALLED,
    EngineState.RESTARTING,
    EngineState.LOADING,
    EngineState.DEAD,
)


class Replica:
    """One of the engines. A new engine with the same number may replace it."""

    def __init__(self, client: ProcessClient) -> None:
        self.client = client
        self.is_leaving = False  # takes no more requests
        self.process: object = None  # the one whose cache the router knows
        self._info: ModelInfo | None = None

    @property
    def info(self) -> ModelInfo:
        """The description of the latest engine of this replica that became ready. Raises EngineDeadError if there was
        none.
        """
        with suppress(EngineDeadError):
            self._info = self.client.info
        return self._info if self._info is not None else self.client.info

    def status(self) -> EngineStatus:
        return self.client.status()

    async def metrics(self) -> EngineMetrics:
        return await self.client.metrics()

    @property
    def serves(self) -> bool:
        """True if the replica accepts requests now."""
        return not self.is_leaving and self.status().state is EngineState.READY


class ReplicaClient:
    """Implements `octavo.engine.client.EngineClient` for `config.data_parallel_size` engines on one machine."""

    def __init__(
        self, config: EngineConfig, *, stall_timeout_s: float = 30.0, on_progress: LoadProgress | None = None
    ) -> None:
        """Start loading the first replica. Its share of the memory determines the share of every other replica.

        The parameters and errors are those of `ProcessClient`.
        """
        self._count = config.data_parallel_size
        self._config = config  # configuration of each replica, once the first is loaded
        self._stall_timeout_s = stall_timeout_s
        self._on_progress = on_progress
        self.replicas: list[Replica] = []
        self._add()
        self._router = Router([])
        self._is_closed = False
        self._starting = asyncio.create_task(self._start_all(), name="start replicas")
        self._starting.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._restarting: asyncio.Task[None] | None = None

    @property
    def info(self) -> ModelInfo:
        """The description of all replicas together, with threads, memory and sequences summed up."""
        infos = [replica.info for replica in self.replicas]
        first = infos[0]
        return replace(
            first,
            max_model_len=min(info.max_model_len for info in infos),
            **{name: sum(getattr(info, name) for info in infos) for name in _SUMS},
        )

    def status(self) -> EngineStatus:
        """Return the state of the best replica, the first reason that a replica reports, and the sums of the counts."""
        statuses = [replica.status() for replica in self.replicas]
        best = min((status.state for status in statuses), key=_BEST_FIRST.index)
        ages = [status.last_step_age_s for status in statuses if status.last_step_age_s is not None]
        return EngineStatus(
            best if self._starting.done() else EngineState.LOADING,
            next((f"replica {i}: {status.reason}" for i, status in enumerate(statuses) if status.reason), None),
            last_step_age_s=min(ages, default=None),
            num_restarts=sum(status.num_restarts for status in statuses),
            load_progress=sum(status.load_progress for status in statuses) / self._count,
            metrics=functools.reduce(EngineMetrics.plus, [status.metrics for status in statuses]),
        )

    async def wait_ready(self) -> None:
        await asyncio.shield(self._starting)

    async def generate(self, request: GenerationRequest) -> ReplicaStream:
        prompt = RoutedPrompt.of(request.prompt, request.options, request.params.num_choices or 1)
        return await ReplicaStream(functools.partial(self._submit, request, prompt)).start()

    async def metrics(self) -> EngineMetrics:
        serving = [replica for replica in self.replicas if replica.serves]
        if not serving:
            raise self._refusal()
        found = await asyncio.gather(*(replica.metrics() for replica in serving))
        return functools.reduce(EngineMetrics.plus, found)

    async def sleep(self) -> None:
        raise UsageError("replicas compute on the CPU and use no device memory", code="cannot_sleep")

    async def wake_up(self) -> None:
        """Do nothing: replicas never sleep."""

    async def act_on_slot(self, action: SlotAction) -> SlotReport:
        raise UsageError(
            f"slot {action.slot} cannot be saved or restored: there are {self._count} replicas, and each has its own; "
            "start the server without --data-parallel-size",
            code="invalid_value",
        )

    async def add_adapter(self, name: str, path: str, scale: float) -> None:
        serving = [replica for replica in self.replicas if replica.serves]
        await asyncio.gather(*(replica.client.add_adapter(name, path, scale) for replica in serving))

    async def remove_adapter(self, name: str) -> None:
        serving = [replica for replica in self.replicas if replica.serves]
        await asyncio.gather(*(replica.client.remove_adapter(name) for replica in serving))

    async def restart(self) -> None:
        """Replace the replicas one by one, each after its last request. A second call joins the first.

        The restart continues if the caller is cancelled.
        Raises the error that prevented a new replica from loading; the remaining ones are then kept.
        """
        if self._is_closed:
            raise self._refusal()
        if self._restarting is None or self._restarting.done():
            self._restarting = asyncio.create_task(self._replace_all(), name="restart replicas")
            self._restarting.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._restarting)

    async def close(self) -> None:
        self._is_closed = True
        tasks = [task for task in (self._starting, self._restarting) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(replica.client.close() for replica in self.replicas))

    # --- their start and restart ---

    async def _start_all(self) -> None:
        first = self.replicas[0]
        await first.client.wait_ready()
        self._config = settled(self._config, first.info)
        for _ in range(1, self._count):
            self._add()
        await asyncio.gather(*(replica.client.wait_ready() for replica in self.replicas[1:]))
        has_prefixes = self._config.enable_prefix_caching and first.info.texts.generates
        self._router = Router([r.info.num_cache_tokens if has_prefixes else 0 for r in self.replicas])

    def _add(self) -> None:
        self.replicas.append(Replica(self._client(len(self.replicas))))

    def _client(self, number: int) -> ProcessClient:
        def on_progress(phase: str, done: int, total: int) -> None:
            if self._on_progress is not None:
                self._on_progress(f"replica {number}: {phase}", done, total)

        return ProcessClient(self._config, stall_timeout_s=self._stall_timeout_s, on_progress=on_progress)

    async def _replace_all(self) -> None:
        await self.wait_ready()
        dead_first = sorted(enumerate(self.replicas), key=lambda item: item[1].status().state is not EngineState.DEAD)
        for number, replica in dead_first:
            others = [other for other in self.replicas if other is not replica]
            while replica.serves and not any(other.serves for other in others):
                if all(other.status().state is EngineState.DEAD for other in others):
                    raise EngineDeadError(f"replica {number} is the only one left: it cannot be restarted")
                await asyncio.sleep(_POLL_S)
            replica.is_leaving = True
            try:
                logger.info("restarting replica %d after its last request", number)
                while not self._router.is_idle(number):
                    await asyncio.sleep(_POLL_S)
                await replica.client.close()
                replica.client = self._client(number)
                await replica.client.wait_ready()
            finally:
                replica.is_leaving = False

    # --- their requests ---

    async def _submit(
        self, request: GenerationRequest, prompt: RoutedPrompt, tried: set[int]
    ) -> tuple[MergedStream, Visit]:
        """Submit a request to the best replica that was not tried yet. Raises the error of the last one tried."""
        error: OctavoError | None = None
        if not self._starting.done():
            raise self._refusal()
        while numbers := [i for i, replica in enumerate(self.replicas) if i not in tried and replica.serves]:
            for i in numbers:
                self._notice_restart(i)
            number = self._router.choose(prompt, numbers)
            visit = self._router.enter(number, prompt)
            try:
                return await self.replicas[number].client.generate(request), visit
            except (OverloadedError, EngineDeadError) as refused:
                visit.leave()
                tried.add(number)
                error = refused
            except BaseException:
                visit.leave()
                raise
        raise error or self._refusal()

    def _notice_restart(self, number: int) -> None:
        replica = self.replicas[number]
        if (process := (replica.client, replica.status().pid)) != replica.process:
            replica.process = process
            self._router.forget(number)

    def _refusal(self) -> OctavoError:
        if self._is_closed:
            return refusal(EngineState.DEAD, "it was closed")
        status = self.status()
        # While the last one that is ready waits to be replaced, it counts as one that restarts.
        state = EngineState.RESTARTING if status.state is EngineState.READY else status.state
        return refusal(state, status.reason)


class ReplicaStream:
    """Implements `octavo.engine.client.AnswerStream`.

    If its replica dies before the first output, another one restarts the request, but only once, because the request
    itself may be the cause.
    """

    def __init__(self, submit: Callable[[set[int]], Awaitable[tuple[MergedStream, Visit]]]) -> None:
        """submit: passes the request to a replica that is not in the set, and adds those that refuse it to the set."""
        self._submit = submit
        self._tried: set[int] = set()
        self._has_output = self._has_moved = False
        self._stream: MergedStream
        self._visit: Visit

    async def start(self) -> ReplicaStream:
        """Submit the request. Raises the errors of `EngineClient.generate`."""
        self._stream, self._visit = await self._submit(self._tried)
        return self

    @property
    def engine(self) -> int:
        """The number of the replica that answers."""
        return self._visit.number

    @property
    def request_id(self) -> str:
        return f"{self._stream.request_id}-{self.engine}"

    def __aiter__(self) -> AsyncIterator[OutputDelta | PoolingOutput]:
        return self

    async def __anext__(self) -> OutputDelta | PoolingOutput:
        while True:
            try:
                output = await self._stream.__anext__()
            except EngineDeadError as error:
                self._visit.leave()
                await self._move(error)
                continue
            except (OctavoError, StopAsyncIteration):
                self._visit.leave()
                raise
            self._has_output = True
            if isinstance(output, OutputDelta):
                self._visit.grow(sum(len(choice.token_ids) for choice in output.outputs))
            if output.finished:
                self._visit.leave()
            return output

    async def aclose(self) -> None:
        self._visit.leave()
        await self._stream.aclose()

    async def _move(self, error: EngineDeadError) -> None:
        """Restart the request on another replica. Raises the error if outputs would be repeated or if no replica is
        left.
        """
        if self._has_output or self._has_moved:
            raise error
        self._has_moved = True
        self._tried.add(self.engine)
        try:
            self._stream, self._visit = await self._submit(self._tried)
        except (EngineDeadError, OverloadedError):
            raise error from None
        logger.warning("a request without output was moved to replica %d", self.engine)
