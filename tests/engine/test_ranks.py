"""Engines of several ranks: the answers of one rank, and an error in time when a rank is gone."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from octavo import LLM, SamplingParams, StructuredOutputsParams
from octavo.backends.memory import MemoryBudget
from octavo.config import EngineConfig
from octavo.distributed.connection import Connection
from octavo.distributed.executor import GroupExecutor
from octavo.distributed.leader import Leader
from octavo.distributed.rank_messages import Joining, Setup
from octavo.distributed.ranks import Ranks
from octavo.engine import load
from octavo.engine.ranks import following
from octavo.errors import EngineDeadError, OctavoError, UsageError
from tests.support.engine_answers import PROMPTS, answers
from tests.support.numa_nodes import pretend
from tests.support.text_models import save_decoder
from tests.support.waiting import wait_until
from tests.support.witness import on_path

SHARED_MEMORY = Path("/dev/shm")
OF_OTHERS = frozenset(SHARED_MEMORY.iterdir())  # a server on this machine, or what a killed one has left
OPTIONS = {"num_threads": 1, "max_model_len": 160, "max_num_seqs": 4, "block_size": 16}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_decoder(tmp_path_factory.mktemp("decoder")))


def answers_of_ranks(model: str, tensor: int, pipeline: int) -> list[object]:
    """Those of an engine with so little memory in each rank that sequences are preempted."""
    memory = (40 << 10) // (min(tensor, 2) * pipeline)
    options = {**OPTIONS, "tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    with LLM(model, kv_cache_memory=memory, **options) as llm:
        return answers(llm)


@pytest.fixture(scope="module")
def of_one_rank(model: str) -> list[object]:
    return answers_of_ranks(model, 1, 1)


SHAPES = [(2, 1), (1, 2), *(pytest.param(*shape, marks=pytest.mark.slow) for shape in [(3, 1), (4, 1), (2, 2)])]


@pytest.mark.parametrize(("tensor", "pipeline"), SHAPES)
def test_the_answers_of_one_rank(model: str, of_one_rank: list[object], tensor: int, pipeline: int) -> None:
    assert answers_of_ranks(model, tensor, pipeline) == of_one_rank
    assert not children()
    assert not segments()


def test_ranks_are_bound_to_nodes(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each CPU of this machine as a node: a rank has the CPUs of its own, and the caller keeps all of them."""
    allowed = sorted(os.sched_getaffinity(0))[:2]
    if len(allowed) < 2:
        pytest.skip("one CPU")
    for name, value in on_path("fake_nodes").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OCTAVO_TEST_NODES", str(tmp_path))
    pretend(monkeypatch, tmp_path, *(str(cpu) for cpu in allowed))
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, allowed)
    caplog.set_level("INFO", "octavo")
    try:
        with LLM(model, tensor_parallel_size=2, max_model_len=160) as llm:
            assert llm.generate("a dog", SamplingParams(temperature=0, max_tokens=3))[0].outputs[0].token_ids
            assert os.sched_getaffinity(0) == set(allowed)
            (rank,) = children()
            assert os.sched_getaffinity(rank) == {allowed[1]}
            engine = next(thread for thread in threading.enumerate() if thread.name == "octavo-engine")
            assert engine.native_id is not None
            assert os.sched_getaffinity(engine.native_id) == {allowed[0]}
    finally:
        os.sched_setaffinity(0, before)
    assert f"rank 0 runs on CPUs {allowed[0]} of one NUMA node" in caplog.text


BIASES = {"logit_bias": {3: 2.0, 7: -100.0}, "repetition_penalty": 1.3, "presence_penalty": 0.4}
SAMPLED = [
    {"temperature": 0, "logprobs": 5},
    {"temperature": 0, "logprobs": 3, **BIASES},
    {"temperature": 1.0, "top_k": 10, "top_p": 0.9, "logprobs": 4},
    {"temperature": 0.8, "top_p": 0.9, **BIASES},
    {"temperature": 1.2, "min_p": 0.1, "logprobs": 0},
    {"temperature": 1.0, "prompt_logprobs": 2},
    {"temperature": 1.0, "structured_outputs": StructuredOutputsParams(regex="[a-z ]{12}")},
]


def test_sampled_tokens_of_one_rank(model: str) -> None:
    """Each row by its own options, from the candidates of the ranks or from all logits."""
    params = [SamplingParams(seed=at, max_tokens=24, **options) for at, options in enumerate(SAMPLED)]  # type: ignore[arg-type]
    found = []
    for size in (1, 2):
        with LLM(model, tensor_parallel_size=size, **OPTIONS) as llm:
            found.append([output.outputs[0] for output in llm.generate([PROMPTS[0]] * len(params), params)])
    for one, two in zip(*found, strict=True):
        assert two.token_ids == one.token_ids
        for expected, sampled in zip(one.logprobs or [], two.logprobs or [], strict=True):
            assert {token: each.rank for token, each in sampled.items()} == {
                token: each.rank for token, each in expected.items()
            }
            assert [each.logprob for each in sampled.values()] == pytest.approx(
                [each.logprob for each in expected.values()], abs=1e-4
            )


def children() -> list[int]:
    """The processes of ranks that this one has started, zombies not counted."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread or a child that has just ended
            for child in (task / "children").read_text().split():
                with_state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                if with_state[0] != "Z" and b"rank_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
    return found


def segments() -> list[Path]:
    """Those that stay. Other tests have some for a moment, until their ranks have come together."""
    left = [path for path in SHARED_MEMORY.glob("octavo-*") if path not in OF_OTHERS]
    with suppress(AssertionError):  # the caller's names those that are left
        wait_until(lambda: not any(path.exists() for path in left))
    return [path for path in left if path.exists()]


@pytest.fixture
def of_two(model: str, request: pytest.FixtureRequest) -> Iterator[LLM]:
    tensor, pipeline = request.param
    with LLM(model, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, **OPTIONS) as llm:
        yield llm


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("of_two", [(2, 1), (1, 2)], indirect=True)
def test_a_rank_that_is_gone_ends_all_requests(of_two: LLM, number: signal.Signals) -> None:
    (rank,) = children()
    endless = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    running = of_two.stream(PROMPTS[2], endless)
    next(running)
    hit_at = time.monotonic()
    os.kill(rank, number)
    with pytest.raises(EngineDeadError, match=r"rank 1") as caught:
        generate_for_ever(of_two, endless)
    assert time.monotonic() - hit_at < 5
    assert "gone" in str(caught.value) or "has died or was stopped" in str(caught.value)
    with pytest.raises(EngineDeadError):
        of_two.generate("and again", endless)
    of_two.close()
    assert not children()
    assert not segments()


def generate_for_ever(llm: LLM, params: SamplingParams) -> None:
    while True:
        llm.generate(PROMPTS[2:] * 4, params)


def test_more_stages_than_layers(model: str) -> None:
    with pytest.raises(UsageError, match="pipeline_parallel_size is 3, but the model has only 2 layers"):
        LLM(model, pipeline_parallel_size=3, **OPTIONS)
    assert not children()


def test_options() -> None:
    with pytest.raises(UsageError, match="tensor_parallel_size is 65"):
        EngineConfig(tensor_parallel_size=65)
    with pytest.raises(UsageError, match="not on reference"):
        EngineConfig(tensor_parallel_size=2, backend="reference")


@pytest.mark.parametrize("launcher", [None, "LeaderWorkerSet", "Slurm"])
def test_two_machines(
    model: str, of_one_rank: list[object], monkeypatch: pytest.MonkeyPatch, launcher: str | None
) -> None:
    """The second one is a process that comes over the network. Its place is in its flags, or in its environment."""
    monkeypatch.setenv("OCTAVO_CLUSTER_TOKEN", secrets.token_hex(16))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        master = "{}:{}".format(*free.getsockname())
    host, _, port = master.partition(":")
    nodes = {"nnodes": 2, "master": master, "pipeline_parallel_size": 2}
    flags, variables = ["--pipeline-parallel-size", "2"], {"MASTER_PORT": port}
    if launcher is None:
        flags += ["--nnodes", "2", "--node-rank", "1", "--master", master]
    elif launcher == "Slurm":
        variables |= {"SLURM_NNODES": "2", "SLURM_NODEID": "1", "MASTER_ADDR": host}
    else:
        variables |= {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": host}
    command = [sys.executable, "-m", "octavo", "serve", model, *flags]
    helper = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=os.environ | variables)
    try:
        with LLM(model, kv_cache_memory=20 << 10, **nodes, **OPTIONS) as llm:
            greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
            found = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy)]
            assert found == of_one_rank[: len(PROMPTS)]
        assert helper.wait(60) == 0
    finally:
        helper.kill()
        helper.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_the_command_of_their_machine(
    model: str, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setenv("OCTAVO_CLUSTER_TOKEN", secrets.token_hex(16))
    with socket.create_server(("127.0.0.1", 0)) as leader:
        leader.settimeout(60)
        master = "{}:{}".format(*leader.getsockname())
        flags = ["--nnodes", "2", "--node-rank", "1", "--master", master, "--pipeline-parallel-size", "2"]
        helper = subprocess.Popen([sys.executable, "-m", "octavo", "serve", model, *flags], stderr=subprocess.DEVNULL)
        try:
            with leader.accept()[0]:  # a rank has imported its modules and connects
                ranks = psutil.Process(helper.pid).children()
                helper.send_signal(number)
                helper.wait(60)
        finally:
            helper.kill()
            helper.wait()
    gone, alive = psutil.wait_procs(ranks, timeout=60)
    for rank in alive:
        rank.kill()
    assert gone
    assert not alive


def test_a_rank_joins_when_all_have_found_their_parts(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks wait a minute for each other in shared memory; another machine may download the model for longer."""
    joined = threading.Event()

    def join(*_: object) -> None:
        joined.set()
        raise EngineDeadError("far enough")

    monkeypatch.setattr(following, "join", join)
    ours, theirs = (Connection(sock) for sock in socket.socketpair())
    follower = following.Follower(theirs)
    config = EngineConfig(model=model, tensor_parallel_size=2, num_threads=1)
    follower._inbox.put(Setup(config, 1, "name-0", 160, 20))

    def serve() -> None:
        with suppress(EngineDeadError):
            follower._serve()

    serving = threading.Thread(target=serve, daemon=True)
    serving.start()
    assert isinstance(ours.receive(), Joining)
    assert not joined.wait(0.5)  # timed: it must not happen yet
    follower._inbox.put(Joining())
    assert joined.wait(10)
    serving.join(10)


def test_what_loading_waits_for_a_disk_is_not_counted(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks while a rank loads, so at the first question all of that time would have been a wait."""

    class Loaded:
        cache_sizes = SimpleNamespace(block_token_bytes=0, token_bytes=0, state_bytes=0)
        weight_bytes = mapped_bytes = 0

        def progress(self) -> int:
            return 0

    def loaded(*_: object) -> Loaded:
        time.sleep(0.5)  # timed: a wait for a disk that would count
        return Loaded()

    def serve() -> None:
        with suppress(OctavoError):
            follower._serve()

    monkeypatch.setattr(following, "join", lambda *_: None)
    monkeypatch.setattr(following, "compile_graph", loaded)
    monkeypatch.setattr(
        "octavo.platform.processes.thread_file", lambda *_: b"1 (a thread) D 0 0"
    )  # at a disk, all the time
    _ours, theirs = (Connection(sock) for sock in socket.socketpair())
    follower = following.Follower(theirs)
    follower._inbox.put(Setup(EngineConfig(model=model, tensor_parallel_size=2, num_threads=1), 1, "name-0", 160, 20))
    follower._inbox.put(Joining())
    serving = threading.Thread(target=serve, daemon=True)
    serving.start()
    wait_until(lambda: not serving.is_alive() or follower._executor is not None)
    assert 0 < follower._state().waited_s < 0.4
    follower._inbox.put(Joining())  # not the size of the cache, which it waits for
    serving.join(10)


def test_a_rank_with_another_model_is_refused(model: str) -> None:
    _, theirs = (Connection(sock) for sock in socket.socketpair())
    follower = following.Follower(theirs)
    config = EngineConfig(model=model, pipeline_parallel_size=2, nnodes=2, node_rank=1, master="a:1")
    follower._inbox.put(Setup(config, 1, "name-0", 160, 20, digest="0" * 32))
    with pytest.raises(UsageError, match="rank 1 on node 1 has a different model"):
        follower._serve()


def test_nodes() -> None:
    with pytest.raises(UsageError, match="nnodes needs master"):
        EngineConfig(nnodes=2, pipeline_parallel_size=2)
    with pytest.raises(UsageError, match="which 2 nodes cannot share evenly"):
        EngineConfig(nnodes=2, master="a:1", tensor_parallel_size=2)
    with pytest.raises(UsageError, match="serves another machine's engine"):
        LLM("x", nnodes=2, master="a:1", pipeline_parallel_size=2, node_rank=1)


def test_nodes_without_a_token(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_CLUSTER_TOKEN", raising=False)
    with pytest.raises(UsageError, match="OCTAVO_CLUSTER_TOKEN, the same secret"):
        LLM(model, nnodes=2, master="127.0.0.1:9", pipeline_parallel_size=2, **OPTIONS)


def test_the_smallest_machine_decides_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rank says how much it has, and every rank gets as many blocks."""
    config = EngineConfig(tensor_parallel_size=2)
    local = SimpleNamespace(
        mapped_bytes=0, workspace_bytes=0, weight_bytes=1000, num_threads=1, paging=None, cache_sizes=None
    )
    monkeypatch.setattr(load, "memory_of_rank", lambda *_: MemoryBudget(5 << 30))
    for least, expected in ((3 << 30, 3 << 30), (9 << 30, 5 << 30)):
        executor = GroupExecutor(local, Leader(), Ranks(2), None, None, 2000, least)  # type: ignore[arg-type]
        assert load._cache_memory(config, executor, 160) == expected
