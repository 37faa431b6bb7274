"""The ranks that follow a leader, each in its own process, on the same machine or another."""

from __future__ import annotations

import logging
import os
import queue
import subprocess
import sys
import threading
from dataclasses import replace

from octavo import env
from octavo.backends import Executor, RankGroup
from octavo.backends.work_done import WaitMeter, WatchedExecutor, work_done
from octavo.batch import Array
from octavo.config import EngineConfig
from octavo.distributed.connection import Connection, ConnectionEndedError
from octavo.distributed.rank_messages import (
    AdapterPart,
    Alive,
    Allocate,
    Allocated,
    DropAdapter,
    HoldAdapter,
    Joining,
    LoadAdapter,
    Loaded,
    RankFailed,
    RankMessage,
    RunStep,
    Setup,
    StageValues,
    Tensor,
    batch_of,
    saved_blocks,
)
from octavo.distributed.ranks import Ranks, rank_graph
from octavo.distributed.rendezvous import address_of, connect
from octavo.engine.loading.compile_graph import compile_graph
from octavo.engine.loading.devices import memory_of_rank
from octavo.engine.loading.draft_head import DraftHead
from octavo.engine.loading.encoder import vision_of
from octavo.engine.loading.model_graph import executor_limits, model_graph, steps_of
from octavo.engine.ranks.joining import OTHERS_S, join, settled
from octavo.engine.ranks.rank_adapters import RankAdapters
from octavo.errors import EngineDeadError, OctavoError, UsageError
from octavo.loader.checkpoint import open_checkpoint
from octavo.loader.hub import resolve_model

logger = logging.getLogger(__name__)


def follow(config: EngineConfig) -> None:
    """Run this machine's ranks until the leader ends. Only for machines other than the first.

    Raises EngineDeadError if a rank fails.
    """
    assert config.master is not None  # checked with nnodes
    host, port = address_of(config.master)
    env.cluster_token()  # raises if there is none
    path = f"sys.path[:] = {sys.path!r}"
    module = "from octavo.engine.ranks.rank_process import main_over_network"
    calls = [
        f"main_over_network({host!r}, {port}, {rank}, {config.model!r}, {os.getpid()})" for rank in config.ranks_here
    ]
    commands = [f"import sys; {path}; {module}; {call}" for call in calls]
    processes = [subprocess.Popen([sys.executable, "-c", command]) for command in commands]
    try:
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        raise EngineDeadError(f"a rank of node {config.node_rank} has failed; its message is above")


def follow_one(host: str, port: int, rank: int, model: str) -> None:
    """Run one rank in this process. Only for machines other than the first.

    model: the model's name on this machine.
    """
    Follower(connect((host, port), env.cluster_token(), rank, OTHERS_S), model).run()


class Follower:
    """A rank in its own process that follows its leader until the leader is gone."""

    def __init__(self, connection: Connection, model: str | None = None) -> None:
        """model: on a machine other than the leader's, the model's name there, used instead of the leader's."""
        self._connection = connection
        self._model = model
        self._inbox: queue.SimpleQueue[RankMessage] = queue.SimpleQueue()
        self._values: queue.SimpleQueue[StageValues] = queue.SimpleQueue()  # may hold values of several steps
        self._group: RankGroup | None = None
        self._executor: Executor | None = None  # once it is loaded
        self._adapters = RankAdapters()
        self._is_in_step = False
        self._waits: WaitMeter | None = None  # set with the executor, so that loading does not count

    def run(self) -> None:
        """Run until the connection ends, which ends the process. Never returns normally."""
        self._connection.stay_alive(self._state)
        threading.Thread(target=self._read, name="octavo-leader", daemon=True).start()
        try:
            self._serve()
        except ConnectionEndedError:
            os._exit(0)  # the leader is gone
        except OctavoError as error:
            logger.error("%s", error)
            self._say(RankFailed(type(error).__name__, str(error)))
        except RuntimeError as error:  # from a step: another rank is gone
            logger.error("%s", error)
            self._say(RankFailed("EngineDeadError", str(error)))
        except Exception as error:
            logger.exception("this rank failed")
            self._say(RankFailed("EngineDeadError", f"{type(error).__name__}: {error}"))
        os._exit(1)  # native threads may wait for ranks that are gone

    def _state(self) -> Alive:
        """Return the state for the leader. The leader gives up on a rank that is busy but makes no progress."""
        executor = self._executor
        if not isinstance(executor, WatchedExecutor):  # progress is not known
            return Alive()
        assert self._waits is not None
        is_waiting = self._group is not None and self._group.is_waiting
        return Alive(work_done(executor), self._is_in_step and not is_waiting, self._waits.sample())

    def _say(self, message: RankMessage) -> None:
        try:
            self._connection.send(message)
        except ConnectionEndedError:
            return

    def _read(self) -> None:
        try:
            while True:
                message = self._connection.receive()
                if isinstance(message, RankFailed):
                    logger.error("%s", message.reason)
                    os._exit(1)
                if isinstance(message, StageValues):
                    self._values.put(message)
                elif isinstance(message, AdapterPart | HoldAdapter | DropAdapter):
                    self._adapters.take(message)
                else:
                    self._inbox.put(message)
        except ConnectionEndedError:
            os._exit(0)  # the leader is gone

    def _next(self, kind: type[RankMessage]) -> RankMessage:
        message = self._inbox.get()
        if not isinstance(message, kind):
            raise OctavoError(f"the leader sent {type(message).__name__} instead of {kind.__name__}")
        return message

    def _next_step(self) -> RunStep:
        """Return the next step, once the adapters it reads are in their slots."""
        while True:
            message = self._inbox.get()
            if isinstance(message, RunStep):
                return message
            if not isinstance(message, LoadAdapter):
                raise OctavoError(f"the leader sent {type(message).__name__} instead of a step")
            self._adapters.load(message)

    def _serve(self) -> None:
        setup = self._next(Setup)
        assert isinstance(setup, Setup)
        config = setup.config if self._model is None else replace(setup.config, model=self._model)
        ranks, rank = Ranks.of(config), setup.rank
        checkpoint = open_checkpoint(resolve_model(config.model, revision=config.revision))
        if (vision := vision_of(config, checkpoint)) is not None:
            checkpoint = checkpoint.with_sight(vision.config.sight)
        if setup.digest and setup.digest != checkpoint.file.digest():
            node = rank // len(config.ranks_here)
            raise UsageError(
                f"rank {rank} on node {node} has a different model: the tensors of {checkpoint.path} differ from the "
                "first machine's; copy the same files to all machines"
            )
        plain = model_graph(checkpoint, setup.model_len)
        whole = DraftHead(setup.taps).tapped(plain)
        graph = rank_graph(whole, ranks, rank, steps_of(checkpoint, config, whole))
        self._connection.send(Joining())
        self._next(Joining)  # a rank of another machine may have to download the model first
        config = settled(config, rank)
        self._group = group = join(config, graph, ranks, rank, setup.group)
        limits = replace(executor_limits(config, setup.model_len, plain), max_num_outputs=setup.max_num_outputs)
        executor = compile_graph(config, checkpoint, graph, limits, None, group)
        self._adapters.executor = executor
        self._waits, self._executor = WaitMeter(), executor  # in this order, because another thread reads the state
        sizes, own = executor.cache_sizes, executor.weight_bytes
        free = memory_of_rank(config, held_bytes=own).available_bytes - executor.mapped_bytes
        self._connection.send(Loaded(sizes.block_token_bytes, sizes.token_bytes, sizes.state_bytes, own, max(free, 0)))
        allocate = self._next(Allocate)
        assert isinstance(allocate, Allocate)
        executor.allocate_cache(allocate.num_blocks, allocate.block_size, allocate.num_states)
        self._connection.send(Allocated())
        number = 0
        while True:
            step = self._next_step()
            if step.number != number + 1:
                raise OctavoError(f"the leader is at step {step.number}, this rank at {number + 1}")
            number = step.number
            inputs: tuple[Array, ...] | None = None
            if graph.receives:
                values = self._values.get()
                if values.number != number:
                    raise OctavoError(f"this rank is at step {number}, but the values are from step {values.number}")
                inputs = tuple(tensor.array() for tensor in values.arrays)
            batch = batch_of(step, inputs, sizes.moved_bytes(allocate.block_size), sizes.moved_state_bytes)
            self._is_in_step = True
            output = executor.submit(batch).wait()
            self._is_in_step = False
            saved = saved_blocks(number, batch)
            if saved is not None:
                self._connection.send(saved)
            if graph.sends:
                self._connection.send(StageValues(number, [Tensor.of(value) for value in output.values]))
