"""The NUMA nodes of a machine, from the kernel's files, and how processes share them."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from octavo.config import EngineConfig
from octavo.engine.ranks.joining import settled
from octavo.errors import ModelLoadError
from octavo.platform import numa, processors
from octavo.quality import scorer
from tests.support.numa_nodes import pretend


def allow(monkeypatch: pytest.MonkeyPatch, *cpus: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cpus))


def test_the_node_of_cpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path, "0-3,8-11", "4-7,12", "")  # the last is memory alone
    assert numa.nodes_with_cpus() == {0: {0, 1, 2, 3, 8, 9, 10, 11}, 1: {4, 5, 6, 7, 12}}
    assert numa.node_of([1, 9]) == 0
    assert numa.node_of([12]) == 1
    assert numa.node_of([3, 4]) is None
    assert numa.node_of([99]) is None


def test_what_the_system_does_not_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(numa, "NODES", tmp_path / "missing")
    assert numa.nodes_with_cpus() == {}
    assert numa.node_of([0]) is None
    assert numa.cpus_of_process(0, 2, 1) is None
    pretend(monkeypatch, tmp_path, "0-1", "two")
    assert numa.nodes_with_cpus() == {}


def test_processes_share_the_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path, "0-3", "4-7")
    allow(monkeypatch, *range(8))
    assert [numa.cpus_of_process(at, 2, 4) for at in range(2)] == [{0, 1, 2, 3}, {4, 5, 6, 7}]
    assert [min(numa.cpus_of_process(at, 4, 2) or ()) for at in range(4)] == [0, 0, 4, 4]  # neighbours together
    assert numa.cpus_of_process(0, 3, 1) is None  # one node would have two of three
    assert numa.cpus_of_process(0, 2, 5) is None  # more threads than a node has CPUs
    assert numa.cpus_of_process(0, 4, 3) is None
    allow(monkeypatch, 2, 3, 4, 5)
    assert [numa.cpus_of_process(at, 2, 2) for at in range(2)] == [{2, 3}, {4, 5}]
    allow(monkeypatch, 0, 1, 2, 3)  # as with `numactl --cpunodebind 0`
    assert numa.cpus_of_process(0, 2, 2) is None


def test_a_machine_that_binds_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Such as a container whose rules refuse the system call."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(numa, "cpus_of_process", lambda *_: {0})
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    config = EngineConfig(model="model", tensor_parallel_size=2, backend="cpu", num_threads=1)
    assert settled(config, 1).num_threads == 1
    assert "rank 1 is not bound to a NUMA node, and may be slower: Operation not permitted" in caplog.text


def test_a_scorer_leaves_its_thread_its_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)

    def bound(*_: object) -> None:
        os.sched_setaffinity(0, {min(before)})
        raise ModelLoadError("no model")

    for name, found in (("load_engine", bound), ("check_weights", lambda *_: None)):
        monkeypatch.setattr(scorer, name, found)
    with pytest.raises(ModelLoadError):
        scorer.Scorer(EngineConfig(model="model"))
    assert os.sched_getaffinity(0) == before


def test_a_thread_gets_its_cpus_back() -> None:
    before = os.sched_getaffinity(0)
    seen: list[set[int]] = []
    one = {min(before)}
    with processors.kept_affinity():
        os.sched_setaffinity(0, one)
        started = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        started.start()
        started.join()
    assert seen == [one]
    assert os.sched_getaffinity(0) == before
