"""A rank that lives and never comes ends its step within seconds; one that computes or reads for long does not."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.batch import Batch
from octavo.distributed.patience import LEAST_S, Patience
from octavo.engine.load import model_graph
from octavo.errors import EngineDeadError
from octavo.graph.ops import Op
from octavo.loader.checkpoint import open_checkpoint
from tests.engine.test_ranks import OPTIONS, PROMPTS, children, segments
from tests.support.text_models import save_decoder
from tests.support.witness import faulty

IN_TIME_S = 6.0  # about five seconds, on a machine with other work
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
        with pytest.raises(EngineDeadError, match=r"rank 1 is gone: it lives, but has been stuck in a step for"):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert time.monotonic() - start < IN_TIME_S
    assert not children()
    assert not segments()


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
