"""Ranks on a Ray cluster: a placement group with a bundle per machine, and an actor per rank.

Ray places and starts the ranks and reports when one has died. Steps and values use Octavo's own connections, as they do
between machines without Ray (`octavo.distributed.rendezvous`).
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from octavo.config import EngineConfig
from octavo.distributed.leader import Leader
from octavo.distributed.rendezvous import accept_ranks, connect
from octavo.engine.ranks.following import Follower
from octavo.errors import EngineDeadError, UsageError

_PLACED_S = 60.0  # wait for Ray to place the ranks
_COME_S = 300.0  # wait for the ranks to join
_LOOK_S = 1.0


def lead_on_ray(config: EngineConfig, leader: Leader) -> EngineConfig:
    """Start all ranks except this process's own as actors that join the leader.

    Return the options with the number of threads per rank. Raises UsageError if there is no cluster or it is too small.
    """
    ray = _ray()
    is_ours = not ray.is_initialized()
    if is_ours:
        _join_cluster(ray)
    try:
        ranks = _RayRanks(ray, config, leader, is_ours)
        ranks.start()
    except BaseException:
        if is_ours:
            ray.shutdown()
        raise
    return ranks.config


def follow_on_ray(host: str, port: int, token: str, rank: int) -> None:
    """Run one rank in its actor's process until its leader ends."""
    Follower(connect((host, port), token, rank, _COME_S)).run()


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise UsageError("distributed_executor 'ray' needs ray: pip install 'octavo[ray]'") from None
    return ray


def _join_cluster(ray: Any) -> None:
    try:
        # Never without an address: that would start a new cluster on this machine.
        ray.init(address="auto", log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UsageError(
            f"distributed_executor 'ray' finds no Ray cluster ({str(error).splitlines()[0]}): start one with "
            "`ray start --head`, or set RAY_ADDRESS"
        ) from None


class _RayRanks:
    """The placement group, its actors, and the thread that notices when they end."""

    def __init__(self, ray: Any, config: EngineConfig, leader: Leader, is_ours: bool) -> None:
        """is_ours: this process opened the connection to the cluster, and closes it when the ranks end."""
        self._ray, self._leader, self._is_ours = ray, leader, is_ours
        self._host = ray.util.get_node_ip_address()
        nodes = [node for node in ray.nodes() if node["Alive"]]
        here = next((node for node in nodes if node["NodeManagerAddress"] == self._host), None)
        if here is None:
            raise UsageError(f"this machine, {self._host}, is not a node of the Ray cluster: run `ray start` here too")
        per_node = len(config.ranks_here)
        threads = config.num_threads or max(int(here["Resources"].get("CPU", 0)) // per_node, 1)
        self.config = replace(config, num_threads=threads)
        self._bundle = {"CPU": threads * per_node}
        large = [node for node in nodes if node["Resources"].get("CPU", 0) >= self._bundle["CPU"]]
        if len(large) < config.nnodes:
            raise UsageError(
                f"{per_node} ranks of {threads} threads on each of {config.nnodes} machines need "
                f"{self._bundle['CPU']} CPUs on each, but {len(large)} of the {len(nodes)} nodes of the Ray cluster "
                "have that many; lower num_threads or the number of ranks, or add nodes"
            )
        self._group: Any = None
        self._runs: dict[Any, int] = {}  # reference of an actor's task -> its rank

    def start(self) -> None:
        """Start the actors. Return when all ranks have joined the leader."""
        ray, config = self._ray, self.config
        # The first bundle is on this machine, whose rank 0 is this process.
        bundles = [{**self._bundle, f"node:{self._host}": 0.001}, *[self._bundle] * (config.nnodes - 1)]
        strategy = "STRICT_SPREAD" if config.nnodes > 1 else "STRICT_PACK"
        self._group = ray.util.placement_group(bundles, strategy=strategy)
        try:
            if not self._group.wait(timeout_seconds=_PLACED_S):
                raise EngineDeadError(
                    f"the Ray cluster had no room for {config.nnodes} x {self._bundle['CPU']} CPUs within "
                    f"{_PLACED_S:.0f} s; wait for its other jobs to end"
                )
            token = secrets.token_hex(16)
            found = accept_ranks(
                (self._host, 0),
                token,
                range(1, config.num_ranks),
                _COME_S,
                listening=lambda port: self._start_actors(port, token),
                check=self._check_actors,
            )
        except BaseException:
            self._end()
            raise
        for rank, connection in found.items():
            self._leader.admit(rank, connection)
        threading.Thread(target=self._watch, name="octavo-ray", daemon=True).start()

    def _start_actors(self, port: int, token: str) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        per_node = len(self.config.ranks_here)
        actor = self._ray.remote(_RankActor)
        for rank in range(1, self.config.num_ranks):
            place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank // per_node)
            options = {"num_cpus": self.config.num_threads, "max_restarts": 0, "scheduling_strategy": place}
            self._runs[actor.options(**options).remote().follow.remote(self._host, port, token, rank)] = rank

    def _check_actors(self) -> None:
        """Raise EngineDeadError if an actor ended before its rank joined."""
        ended, _ = self._ray.wait(list(self._runs), timeout=0)
        for reference, reason in self._reasons(ended):
            raise EngineDeadError(f"rank {self._runs[reference]} is gone; Ray reports: {reason}")

    def _watch(self) -> None:
        """Tell the leader about each rank that Ray reports as ended."""
        waiting = list(self._runs)
        while waiting:
            ended, waiting = self._ray.wait(waiting, timeout=_LOOK_S)
            for reference, reason in self._reasons(ended):
                self._leader.fail(self._runs[reference], f"Ray reports: {reason}")
        self._end()

    def _reasons(self, ended: list[Any]) -> Iterator[tuple[Any, str]]:
        for reference in ended:
            reason = "it has ended"
            try:
                self._ray.get(reference)
            except Exception as error:  # Ray raises many kinds
                reason = " ".join(str(error).split())
            yield reference, reason

    def _end(self) -> None:
        with suppress(Exception):  # the cluster may be gone
            self._ray.util.remove_placement_group(self._group)
            if self._is_ours:
                self._ray.shutdown()


class _RankActor:
    """The process of a rank, as Ray starts it."""

    def follow(self, host: str, port: int, token: str, rank: int) -> None:
        follow_on_ray(host, port, token, rank)
