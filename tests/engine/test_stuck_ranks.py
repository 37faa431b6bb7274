"""A rank that lives and never comes ends its step within seconds; one that computes or reads for long does not."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.batch import Batch
from octavo.distributed.connection import ALIVE_S, Connection
from octavo.distributed.executor import GroupExecutor
from octavo.distributed.leader import Leader, RemoteRank
from octavo.distributed.patience import LEAST_S, MOST_WAITED_S, Patience
from octavo.distributed.rank_messages import Alive
from octavo.distributed.ranks import Ranks
from octavo.engine.loading.model_graph import model_graph
from octavo.errors import EngineDeadError
from octavo.graph.ops.base import Op
from octavo.loader.checkpoint import open_checkpoint
from tests.engine.test_ranks import OPTIONS, PROMPTS, children, segments
from tests.support.text_models import save_decoder
from tests.support.witness import faulty

IN_TIME_S = 5.0  # of the time in which the rank could compute
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_decoder(tmp_path_factory.mktemp("decoder")))


def inject(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    for name, value in faulty(fault).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("fault", "tensor", "pipeline"),
    [("spin", 2, 1), ("spin", 1, 2), pytest.param("sleep", 2, 1, marks=pytest.mark.slow)],
)
def test_a_step_that_never_ends(
    model: str, monkeypatch: pytest.MonkeyPatch, fault: str, tensor: int, pipeline: int
) -> None:
    inject(monkeypatch, f"rank_step:{fault}:5")
    with LLM(model, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, **OPTIONS) as llm:
        start = time.monotonic()
        with pytest.raises(EngineDeadError, match=r"rank 1 is gone: it is alive, but has been stuck") as caught:
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        passed_s = time.monotonic() - start
    beside = re.search(r"not counting (\S+) s of waiting", str(caught.value))  # other programs use this machine
    assert passed_s < IN_TIME_S + (float(beside[1]) if beside else 0.0)
    assert not children()
    assert not segments()


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("share", [0.5, pytest.param(0.1, marks=pytest.mark.slow)])
def test_a_rank_that_is_stopped_in_turns_is_slow(model: str, tensor: int, pipeline: int, share: float) -> None:
    """It has a share of the time, in pieces of a tenth of a second, as under a limit of its processor time."""
    with LLM(model, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, **OPTIONS) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
        (rank,) = children()
        done = threading.Event()

        def slow_down() -> None:
            while not done.wait(0.1 * share):  # timed: its turn
                os.kill(rank, signal.SIGSTOP)
                time.sleep(0.1 * (1 - share))  # timed: the turn of others
                os.kill(rank, signal.SIGCONT)

        slowing = threading.Thread(target=slow_down)
        slowing.start()
        try:
            start = time.monotonic()
            found = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
            assert time.monotonic() - start < 60
        finally:
            done.set()
            slowing.join()
    assert found == expected
    assert not children()
    assert not segments()


def test_a_batch_that_is_refused_is_told_to_nobody(ops: list[Op]) -> None:
    leader, planned = Leader(), []
    leader.patience = Patience(ops, 1)
    leader.patience.begin = planned.append  # type: ignore[method-assign]

    def refuse(_: Batch) -> None:
        raise ValueError("too many tokens")

    sizes = {"weight_bytes": 0, "mapped_bytes": 0, "workspace_bytes": 0, "num_threads": 1}
    cache_sizes = SimpleNamespace(moved_bytes=lambda _: 0)
    local = SimpleNamespace(submit=refuse, cache_sizes=cache_sizes, **sizes)
    executor = GroupExecutor(local, leader, Ranks(1), None, cache_sizes, 0, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="too many"):
        executor.submit(step(1))
    assert not planned
    local.submit = lambda _: SimpleNamespace(wait=None)
    executor.submit(step(1))
    assert len(planned) == 1


def test_time_at_a_disk_or_in_a_queue_does_not_count(ops: list[Op]) -> None:
    """A rank that says so is given up later, but is given up."""
    ours, _ = (Connection(sock) for sock in socket.socketpair())
    remote, patience = RemoteRank(1, ours, lambda *_: None), Patience(ops, 1)
    ours.heard = Alive(7, is_busy=True, waited_s=100.0)  # long ago
    assert remote.stuck_s(10.0, patience) == (0.0, 0.0)
    assert remote.stuck_s(12.0, patience) == (2.0, 0.0)
    ours.heard = Alive(7, is_busy=True, waited_s=103.0)
    assert remote.stuck_s(14.0, patience) == (1.0, 3.0)
    ours.heard = Alive(8, is_busy=True, waited_s=103.0)
    assert remote.stuck_s(15.0, patience) == (0.0, 0.0)
    assert patience.limit_s() == LEAST_S + 2 * (5.0 - 3.0 - ALIVE_S)  # what it computed in silence
    ours.heard = Alive(8, is_busy=True, waited_s=903.0)
    assert remote.stuck_s(65.0, patience) == (50.0 - MOST_WAITED_S, MOST_WAITED_S)


def test_a_process_says_for_how_long_it_waits_for_a_processor() -> None:
    """Two threads of a process that has one CPU."""
    code = (
        "import hashlib, os, threading, time\n"
        "from octavo.backends.work_done import WaitMeter\n"
        "meter, idle = WaitMeter(), WaitMeter()\n"
        "meter.sample(); time.sleep(0.3); alone = meter.sample()\n"  # timed: time in which it waits for nothing
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "end, data = time.monotonic() + 1, bytes(1 << 20)\n"
        "def work():\n"
        "    while time.monotonic() < end: hashlib.sha256(data)\n"  # which lets go of the interpreter
        "threads = [threading.Thread(target=work) for _ in range(3)]\n"
        "for each in threads: each.start()\n"
        "time.sleep(0.1); before = meter.sample()\n"  # timed: the threads compete from here on
        "while time.monotonic() < end - 0.2:\n"
        "    time.sleep(0.1); waited = meter.sample()\n"  # timed: samples at intervals, as a rank takes them
        "print(alone, waited - before)\n"
    )
    alone, waited = map(
        float, subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split()
    )
    assert alone < 0.3
    assert 0.2 < waited < 1.0


def file_on_a_disk(path: Path) -> Path:
    """Half a MiB, written."""
    path.write_bytes(os.urandom(1 << 19))
    os.sync()
    return path


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_a_slow_disk_is_no_failure(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensor: int, pipeline: int
) -> None:
    """One step of a rank takes six seconds, in which it computes nothing and blocks come in from the disk."""
    options: dict[str, Any] = {**OPTIONS, "tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    with LLM(model, **options) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    inject(monkeypatch, "rank_step:read:5")
    monkeypatch.setenv("OCTAVO_TEST_FILE", str(file_on_a_disk(tmp_path / "file")))
    with LLM(model, **options) as llm:
        start = time.monotonic()
        found = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
        assert time.monotonic() - start > 5
    assert found == expected


def step(tokens: int) -> Batch:
    numbers = np.zeros(tokens, np.int32)
    lens = np.array([tokens], np.int32)
    return Batch(numbers, numbers, np.array([0, tokens], np.int32), lens, numbers[None], numbers[None], lens - 1)


@pytest.fixture
def ops(model: str) -> list[Op]:
    return [node.op for node in model_graph(open_checkpoint(Path(model)), 160).nodes]


def test_the_first_steps_have_the_time_that_is_planned(ops: list[Op]) -> None:
    patience = Patience(ops, 1)
    assert patience.limit_s() == LEAST_S
    limits = []
    for tokens in (1, 100_000, 200_000):
        patience.begin(step(tokens))
        limits.append(patience.limit_s())
    assert limits[0] == pytest.approx(LEAST_S, abs=0.01)
    assert LEAST_S + 1 < limits[1] < limits[2]


def test_steps_that_were_seen_decide(ops: list[Op]) -> None:
    patience = Patience(ops, 1)
    patience.begin(step(200_000))
    planned_s = patience.limit_s()
    patience.note(0.0)
    assert patience.limit_s() == LEAST_S < planned_s
    patience.note(4.0)  # an operation took as long
    assert patience.limit_s() == LEAST_S + 8
    patience.begin(step(1))
    assert patience.limit_s() == LEAST_S + 8  # the machine may be as slow again


def test_steps_that_are_larger_than_those_seen(ops: list[Op]) -> None:
    patience = Patience(ops, 1)
    patience.begin(step(50_000))
    patience.note(0.0)
    patience.begin(step(100_000))
    assert LEAST_S < patience.limit_s() <= LEAST_S + 2 * 4 * 0.5  # attention is four times as much
