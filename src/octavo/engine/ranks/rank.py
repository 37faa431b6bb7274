"""Loads one rank of a model: the leader with all others behind its executor, or one that follows a leader."""

from __future__ import annotations

import logging
import os
import queue
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from octavo import env
from octavo.backends import Executor, ExecutorLimits, RankGroup, numa
from octavo.backends.parameters import column_step
from octavo.backends.rank_segments import remove_segments
from octavo.backends.work_done import WaitMeter, WatchedExecutor, work_done
from octavo.batch import Array
from octavo.config import EngineConfig, LoadProgress
from octavo.distributed.connection import Connection, ConnectionEndedError
from octavo.distributed.executor import GroupExecutor
from octavo.distributed.leader import Leader
from octavo.distributed.patience import Patience
from octavo.distributed.rank_messages import (
    Alive,
    Allocate,
    Allocated,
    Joining,
    Loaded,
    RankFailed,
    RankMessage,
    RunStep,
    Setup,
    StageValues,
    Tensor,
    batch_of,
)
from octavo.distributed.ranks import Ranks, rank_graph
from octavo.distributed.rendezvous import accept_ranks, address_of, connect
from octavo.engine.load import (
    compile_graph,
    executor_limits,
    held,
    memory_of_rank,
    model_graph,
    model_sizes,
    threads_of_rank,
)
from octavo.engine.loading.devices import backend_name, backend_of, of_rank
from octavo.engine.ranks.rank_ray import lead_on_ray
from octavo.errors import EngineDeadError, OctavoError, UsageError
from octavo.graph.builder import Graph
from octavo.graph.ops import AllGather, Collective, MoE
from octavo.graph.shard_wishes import Steps
from octavo.graph.values import LOGITS, RowDomain
from octavo.loader.checkpoint import Checkpoint, open_checkpoint
from octavo.loader.hub import resolve_model

logger = logging.getLogger(__name__)

EXCHANGE_BYTES = 1 << 20  # of the memory in which ranks exchange values: larger ones would leave the caches
_FLOAT_BYTES = 4
_OTHERS_S = 300.0  # for the ranks of all machines to come


def ranks_of(config: EngineConfig) -> Ranks:
    return Ranks(config.tensor_parallel_size, config.pipeline_parallel_size, config.enable_expert_parallel)


def lead(
    config: EngineConfig, checkpoint: Checkpoint, graph: Graph, limits: ExecutorLimits, progress: LoadProgress | None
) -> GroupExecutor:
    """The executor of all ranks, with their processes. graph: the whole model. Raises what a rank raises."""
    ranks = ranks_of(config)
    leader, name = Leader(), secrets.token_hex(8)
    try:
        if config.distributed_executor == "ray":
            config = lead_on_ray(config, leader)
        else:
            leader.spawn(config.ranks_here[1:])
            _admit_other_machines(config, leader)
        for rank in range(1, ranks.count):
            leader.send(_setup(config, checkpoint, rank, f"{name}-{ranks.stage(rank)}", limits), [rank])
        part = rank_graph(graph, ranks, 0, steps_of(checkpoint, config, graph))
        for rank in range(1, ranks.count):
            leader.receive(rank, Joining)
        leader.send(Joining())
        config = settled(config, 0)
        group = join(config, part, ranks, 0, f"{name}-{ranks.stage(0)}", lambda: str(leader.failure or ""))
        local = compile_graph(config, checkpoint, part, limits, _watched(progress, leader), group)
        loaded = [leader.receive(rank, Loaded) for rank in range(1, ranks.count)]
        sizes = local.cache_sizes
        largest = replace(
            sizes,
            block_token_bytes=max([sizes.block_token_bytes, *(each.block_token_bytes for each in loaded)]),
            token_bytes=max([sizes.token_bytes, *(each.token_bytes for each in loaded)]),
            state_bytes=max([sizes.state_bytes, *(each.state_bytes for each in loaded)]),
        )
        weight_bytes = local.weight_bytes + sum(each.weight_bytes for each in loaded)
        available_bytes = min(each.available_bytes for each in loaded)
        leader.patience = Patience((node.op for node in part.nodes), ranks.pipeline_parallel)
        return GroupExecutor(local, leader, ranks, group, largest, weight_bytes, available_bytes)
    except BaseException as error:
        leader.close()
        remove_segments(name)  # of ranks that were killed before they came together
        if isinstance(error, EngineDeadError):
            leader.check()  # the first reason
        raise


def _watched(progress: LoadProgress | None, leader: Leader) -> LoadProgress:
    """Raises the failure of a rank while this one packs weights, which may take minutes."""

    def report(phase: str, done: int, total: int) -> None:
        leader.check()
        if progress is not None:
            progress(phase, done, total)

    return report


def _admit_other_machines(config: EngineConfig, leader: Leader) -> None:
    others = range(len(config.ranks_here), config.num_ranks)
    if others:
        assert config.master is not None  # checked with nnodes
        logger.info("waiting for %d ranks of other machines at %s", len(others), config.master)
        address = address_of(config.master)
        for rank, connection in accept_ranks(address, env.cluster_token(), others, _OTHERS_S).items():
            leader.admit(rank, connection)


def _setup(config: EngineConfig, checkpoint: Checkpoint, rank: int, group: str, limits: ExecutorLimits) -> Setup:
    """Another machine finds the model by its own name for it, this one at the same path."""
    node = rank // len(config.ranks_here)
    model = str(checkpoint.path) if node == 0 else config.model
    digest = checkpoint.file.digest() if node > 0 else ""
    if config.distributed_executor != "ray":  # which has no node_rank
        config = replace(config, node_rank=node)
    return Setup(of_rank(replace(config, model=model), rank), rank, group, limits.max_model_len, digest)


def follow(config: EngineConfig) -> None:
    """Runs the ranks of a machine other than the first until the leader ends. Raises EngineDeadError if one fails."""
    assert config.master is not None  # checked with nnodes
    host, port = address_of(config.master)
    env.cluster_token()  # there is one
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
    """One rank of a machine other than the first, in its own process. model: the name that this machine has for it."""
    Follower(connect((host, port), env.cluster_token(), rank, _OTHERS_S), model).run()


def settled(config: EngineConfig, rank: int) -> EngineConfig:
    """The options with the number of compute threads. Binds this thread, and those that it starts, to a NUMA node.

    It binds nothing where the ranks of this machine do not share the nodes evenly, or something else decides: several
    replicas, Ray, a GPU.
    """
    threads, here = threads_of_rank(config), len(config.ranks_here)
    config = replace(config, num_threads=threads)
    if config.data_parallel_size > 1 or config.distributed_executor == "ray" or backend_name(config) != "cpu":
        return config
    cpus = numa.cpus_of_process(rank % here, here, threads)
    if cpus is not None:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:  # a container may forbid it
            logger.warning("rank %d is not bound to a NUMA node, and may be slower: %s", rank, error.strerror)
            return config
        logger.info("rank %d computes on CPUs %s of one NUMA node", rank, ", ".join(map(str, sorted(cpus))))
    return config


def steps_of(checkpoint: Checkpoint, config: EngineConfig, graph: Graph) -> Steps:
    """The columns at which the weights of a model can be cut."""
    weights = held(checkpoint, config, graph)
    return lambda parameter: column_step(weights, parameter.name)


def join(
    config: EngineConfig,
    graph: Graph,
    ranks: Ranks,
    rank: int,
    name: str,
    given_up: Callable[[], str] | None = None,
) -> RankGroup | None:
    """The group of the ranks of this one's stage; None: it is alone. given_up: a reason to wait no longer, or empty."""
    if ranks.tensor_parallel == 1:
        return None
    row_bytes = 4 * max(node.output.cols for node in graph.nodes)
    size = ranks.tensor_parallel
    num_bytes = max(row_bytes, EXCHANGE_BYTES)
    return backend_of(config).join_group(name, ranks.part(rank), size, num_bytes, given_up)


@dataclass(frozen=True, slots=True)
class RankNeeds:
    """One rank of a model. Sizes in bytes. exchanges: with the other ranks of its stage, in a step.

    exchanged_bytes_per_token: that the rank gives to them. logits_bytes_per_row: that it gives of a row of logits which
    is gathered whole, because it cannot be sampled from the best candidates of each rank. handed_on_bytes_per_token: to
    the next stage. experts: the first and how many of each mixture, if it has not all of them.
    """

    rank: int
    stage: int
    part: int
    weight_bytes: int
    kv_bytes_per_token: int
    state_bytes: int
    workspace_bytes: int
    exchanges: int
    exchanged_bytes_per_token: int
    logits_bytes_per_row: int
    handed_on_bytes_per_token: int
    experts: tuple[int, int] | None = None


def rank_needs(checkpoint: Checkpoint, config: EngineConfig, context: int) -> list[RankNeeds]:
    """The sizes of all ranks, from the headers. context: tokens of the longest request."""
    whole, ranks, found = model_graph(checkpoint, context), ranks_of(config), []
    steps = steps_of(checkpoint, config, whole)
    for rank in range(ranks.count):
        graph = rank_graph(whole, ranks, rank, steps)
        sizes = model_sizes(checkpoint, config, context, graph)
        exchanged = exchanges_of(graph)
        logits = [each.given for each in exchanged if each.rows is LOGITS]
        is_last = ranks.stage(rank) == ranks.pipeline_parallel - 1
        mixtures = [node.op for node in graph.nodes if isinstance(node.op, MoE)] if ranks.whole_experts else []
        found.append(
            RankNeeds(
                rank,
                ranks.stage(rank),
                ranks.part(rank),
                sizes.weight_bytes,
                sizes.cache.token_bytes,
                sizes.cache.seat_bytes,
                sizes.workspace_bytes,
                len(exchanged),
                _FLOAT_BYTES * (sum(each.given for each in exchanged) - sum(logits)),
                _FLOAT_BYTES * sum(logits),
                0 if is_last else _FLOAT_BYTES * sum(value.cols for value in graph.outputs),
                (mixtures[0].first_expert, mixtures[0].gate.shape[0]) if mixtures else None,
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class RankExchange:
    """An exchange of a rank with those of its stage, in columns of each row.

    given: by the rank. moved: through its link, if the ranks form a ring.
    """

    rows: RowDomain
    given: int
    moved: float


def exchanges_of(graph: Graph) -> list[RankExchange]:
    """The exchanges of a rank's step. That of the logits counts as if they were gathered whole."""
    found = []
    for node in graph.nodes:
        if isinstance(node.op, Collective):
            others = (node.op.size - 1) / node.op.size
            # A sum goes around twice: parts of it, and then the whole ones.
            times = 1 if isinstance(node.op, AllGather) else 2
            given = node.op.inputs[0].cols
            found.append(RankExchange(node.output.rows, given, times * others * node.output.cols))
    return found


class Follower:
    """A rank in a process of its own, which does what its leader says until that is gone."""

    def __init__(self, connection: Connection, model: str | None = None) -> None:
        """model: instead of the leader's, on another machine."""
        self._connection = connection
        self._model = model
        self._inbox: queue.SimpleQueue[RankMessage] = queue.SimpleQueue()
        self._values: queue.SimpleQueue[StageValues] = queue.SimpleQueue()  # those of several steps may be under way
        self._group: RankGroup | None = None
        self._executor: Executor | None = None  # once it is loaded
        self._is_in_step = False
        self._waits: WaitMeter | None = None  # from when the executor is there: what loading waits is not a step's

    def run(self) -> None:
        """Returns never normally: the process ends with the connection."""
        self._connection.stay_alive(self._state)
        threading.Thread(target=self._read, name="octavo-leader", daemon=True).start()
        try:
            self._serve()
        except ConnectionEndedError:
            os._exit(0)  # the leader is gone
        except OctavoError as error:
            logger.error("%s", error)
            self._say(RankFailed(type(error).__name__, str(error)))
        except RuntimeError as error:  # of a step: another rank is gone
            logger.error("%s", error)
            self._say(RankFailed("EngineDeadError", str(error)))
        except Exception as error:
            logger.exception("this rank failed")
            self._say(RankFailed("EngineDeadError", f"{type(error).__name__}: {error}"))
        os._exit(1)  # native threads may wait for ranks that are gone

    def _state(self) -> Alive:
        """For the leader, which gives up on a rank that is busy and does not get on."""
        executor = self._executor
        if not isinstance(executor, WatchedExecutor):  # of which that is not known
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
                else:
                    self._inbox.put(message)
        except ConnectionEndedError:
            os._exit(0)  # the leader is gone

    def _next(self, kind: type[RankMessage]) -> RankMessage:
        message = self._inbox.get()
        if not isinstance(message, kind):
            raise OctavoError(f"the leader sent {type(message).__name__} instead of {kind.__name__}")
        return message

    def _serve(self) -> None:
        setup = self._next(Setup)
        assert isinstance(setup, Setup)
        config = setup.config if self._model is None else replace(setup.config, model=self._model)
        ranks, rank = ranks_of(config), setup.rank
        checkpoint = open_checkpoint(resolve_model(config.model, revision=config.revision))
        if setup.digest and setup.digest != checkpoint.file.digest():
            node = rank // len(config.ranks_here)
            raise UsageError(
                f"rank {rank} on node {node} has another model than the first machine: the tensors of "
                f"{checkpoint.path} differ from those there; copy the same files to all machines"
            )
        whole = model_graph(checkpoint, setup.model_len)
        graph = rank_graph(whole, ranks, rank, steps_of(checkpoint, config, whole))
        self._connection.send(Joining())
        self._next(Joining)  # a rank of another machine may have to download the model first
        config = settled(config, rank)
        self._group = group = join(config, graph, ranks, rank, setup.group)
        limits = executor_limits(config, setup.model_len, whole)
        executor = compile_graph(config, checkpoint, graph, limits, None, group)
        self._waits, self._executor = WaitMeter(), executor  # in this order: another thread asks for the state
        sizes, own = executor.cache_sizes, executor.weight_bytes
        free = memory_of_rank(config, held_bytes=own).available_bytes - executor.mapped_bytes
        self._connection.send(Loaded(sizes.block_token_bytes, sizes.token_bytes, sizes.state_bytes, own, max(free, 0)))
        allocate = self._next(Allocate)
        assert isinstance(allocate, Allocate)
        executor.allocate_cache(allocate.num_blocks, allocate.block_size, allocate.num_states)
        self._connection.send(Allocated())
        number = 0
        while True:
            step = self._next(RunStep)
            assert isinstance(step, RunStep)
            if step.number != number + 1:
                raise OctavoError(f"the leader is at step {step.number}, this rank at {number + 1}")
            number = step.number
            inputs: tuple[Array, ...] = ()
            if graph.receives:
                values = self._values.get()
                if values.number != number:
                    raise OctavoError(f"this rank is at step {number}, the values are of step {values.number}")
                inputs = tuple(tensor.array() for tensor in values.arrays)
            batch = batch_of(step, inputs)
            self._is_in_step = True
            output = executor.submit(batch).wait()
            self._is_in_step = False
            if graph.sends:
                self._connection.send(StageValues(number, [Tensor.of(value) for value in output.values]))
