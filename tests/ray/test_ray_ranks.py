"""Ranks as actors of a local Ray: the same answers, ends that are noticed, and errors for what cannot be."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo.config import EngineConfig
from octavo.distributed.leader import Leader
from octavo.engine.loading.model_graph import executor_limits, model_graph
from octavo.engine.ranks.leading import _setup
from octavo.engine.ranks.rank_ray import lead_on_ray
from octavo.errors import EngineDeadError, UsageError
from octavo.llm import LLM
from octavo.loader.checkpoint import open_checkpoint
from octavo.sampling_params import SamplingParams
from tests.support.waiting import wait_until

SOON_S = 30.0
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
OPTIONS: dict[str, Any] = {"kv_cache_memory": "16MiB", "num_threads": 1}
PROMPTS = [[0, 2, 3], [0, 4, 5, 2, 2, 3]]


def ranks_of_ray() -> list[psutil.Process]:
    found = [(process, " ".join(process.info["cmdline"] or ())) for process in psutil.process_iter(["cmdline"])]
    return [process for process, command in found if "_RankActor" in command]


def answers(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def error_of(llm: LLM, params: SamplingParams) -> EngineDeadError | None:
    try:
        list(llm.stream([0, 2], params))
    except EngineDeadError as error:
        return error
    return None


@pytest.mark.usefixtures("cluster")
def test_a_rank_is_an_actor_with_the_same_answers(tiny_path: Path) -> None:
    import ray

    with LLM(str(tiny_path), **OPTIONS) as llm:
        expected = answers(llm)
    with LLM(str(tiny_path), tensor_parallel_size=2, distributed_executor="ray", **OPTIONS) as llm:
        assert answers(llm) == expected
        (rank,) = ranks_of_ray()
        assert rank.pid != os.getpid()
        (group,) = [each for each in ray.util.placement_group_table().values() if each["state"] == "CREATED"]
        assert [bundle["CPU"] for bundle in group["bundles"].values()] == [2]
    wait_until(lambda: not ranks_of_ray(), seconds=SOON_S)
    groups = ray.util.placement_group_table
    wait_until(lambda: not any(each["state"] == "CREATED" for each in groups().values()), seconds=SOON_S)
    assert ray.is_initialized()  # it was not ours


@pytest.mark.usefixtures("cluster")
def test_an_actor_that_dies_ends_the_requests(tiny_path: Path) -> None:
    with LLM(str(tiny_path), tensor_parallel_size=2, distributed_executor="ray", **OPTIONS) as llm:
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        stream = llm.stream([0, 2], params)
        next(stream)
        (rank,) = ranks_of_ray()
        os.kill(rank.pid, signal.SIGKILL)
        for _ in range(100):  # until its death is noticed
            if (error := error_of(llm, params)) is not None:
                break
        assert "rank 1 is gone" in str(error)


@pytest.mark.usefixtures("cluster")
def test_a_cluster_that_is_too_small() -> None:
    config = EngineConfig(tensor_parallel_size=2, distributed_executor="ray", num_threads=8)
    with pytest.raises(UsageError, match=r"2 ranks of 8 threads .* need 16 CPUs on each, but 0 of the 1 nodes"):
        lead_on_ray(config, Leader())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs more than one rank; give tensor_parallel_size"),
        (
            {"tensor_parallel_size": 2, "data_parallel_size": 2},
            "data_parallel_size is 2 with distributed_exec",
        ),
        ({"pipeline_parallel_size": 2, "master": "a:1"}, "master is 'a:1' with distributed_executor ray"),
        ({"pipeline_parallel_size": 2, "nnodes": 2, "node_rank": 1}, "node_rank is 1 with distributed_executor ray"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EngineConfig(distributed_executor="ray", **options)
    with pytest.raises(UsageError, match="distributed_executor is 'mpi'; it must be processes or ray"):
        EngineConfig(distributed_executor="mpi")  # type: ignore[arg-type]


def test_ranks_of_other_nodes_get_their_options(tiny_path: Path) -> None:
    config = EngineConfig(model=str(tiny_path), pipeline_parallel_size=2, nnodes=2, distributed_executor="ray")
    checkpoint = open_checkpoint(tiny_path)
    try:
        limits = executor_limits(config, 64, model_graph(checkpoint, 64))
        setup = _setup(config, checkpoint, 1, "group", limits, ())
        assert (setup.rank, setup.config, setup.digest) == (1, config, checkpoint.file.digest())
    finally:
        checkpoint.close()


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    config = EngineConfig(tensor_parallel_size=2, distributed_executor="ray")
    with pytest.raises(UsageError, match=r"pip install 'octavo\[ray\]'"):
        lead_on_ray(config, Leader())


def test_without_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ray:
        def is_initialized(self) -> bool:
            return False

        def init(self, **_: object) -> None:
            raise ConnectionError("Could not find any running Ray instance.\nMore.")

    monkeypatch.setitem(sys.modules, "ray", Ray())
    config = EngineConfig(tensor_parallel_size=2, distributed_executor="ray")
    with pytest.raises(UsageError, match=r"finds no Ray cluster \(Could not find any .*`ray start --head`"):
        lead_on_ray(config, Leader())
