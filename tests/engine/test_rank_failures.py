"""A rank that is killed, stopped or slowed at a random moment: all requests end in time, and nothing is left."""

from __future__ import annotations

import os
import queue
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import EngineDeadError
from octavo.generation_request import RequestOptions
from octavo.outputs import OutputDelta
from tests.engine.test_ranks import OPTIONS, PROMPTS, children, segments
from tests.support.text_models import save_decoder
from tests.support.waiting import wait_until

SHAPES = [(2, 1), (1, 2), (3, 1), (2, 2)]
IN_TIME_S = 5.0
ENDLESS = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_decoder(tmp_path_factory.mktemp("decoder")))


def hit(action: str, victim: int, after_s: float, hit_at: list[float]) -> None:
    time.sleep(after_s)  # timed: the fault comes at a random moment
    hit_at.append(time.monotonic())
    os.kill(victim, signal.SIGKILL if action == "kill" else signal.SIGSTOP)
    if action == "slow":
        time.sleep(0.5)  # timed: a pause that is no failure
        os.kill(victim, signal.SIGCONT)


def submit(llm: LLM, prompt: str, sink: queue.SimpleQueue[Any]) -> None:
    session = llm._session
    try:
        session.submit(session.create_request(prompt, ENDLESS, options=RequestOptions()), sink.put)
    except EngineDeadError as error:
        sink.put(error)


def last(sink: queue.SimpleQueue[Any]) -> OutputDelta | EngineDeadError:
    """The end of a request."""
    while True:
        item = sink.get(timeout=60)
        if isinstance(item, EngineDeadError) or item.finished:
            return item


def check(model: str, seed: int) -> None:
    rng = random.Random(seed)
    tensor, pipeline = rng.choice(SHAPES)
    action = rng.choice(["kill", "stop", "slow"])
    hit_at: list[float] = []
    with LLM(model, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, **OPTIONS) as llm:
        victim = rng.choice(sorted(children()))
        hitting = threading.Thread(target=hit, args=(action, victim, rng.uniform(0, 0.6), hit_at))
        hitting.start()
        while True:  # until the rank is hit, and the requests that run then have ended
            was_hit = not hitting.is_alive()
            sinks: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in PROMPTS * 2]
            for sink, prompt in zip(sinks, PROMPTS * 2, strict=True):
                submit(llm, prompt, sink)
            ends = [last(sink) for sink in sinks]
            failed = [end for end in ends if isinstance(end, EngineDeadError)]
            if failed or was_hit:
                break
        if action == "slow":
            assert not failed
        else:
            assert time.monotonic() - hit_at[0] < IN_TIME_S
            assert all("rank" in str(error) for error in failed)
            assert failed
        hitting.join()
    assert not children()
    assert not segments()


def test_a_rank_is_hit_at_a_random_moment(model: str) -> None:
    check(model, 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 32))
def test_ranks_are_hit_at_random_moments(model: str, seed: int) -> None:
    check(model, seed)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_a_rank_is_killed_while_it_loads(model: str, seed: int) -> None:
    rng = random.Random(seed)
    found: list[BaseException | None] = []

    def load() -> None:
        try:
            with LLM(model, tensor_parallel_size=2, **OPTIONS) as llm:
                llm.generate(PROMPTS, ENDLESS)
            found.append(None)  # it was killed too late
        except EngineDeadError as error:
            found.append(error)

    loading = threading.Thread(target=load, daemon=True)
    loading.start()
    ranks = wait_until(children, seconds=60)
    time.sleep(rng.uniform(0, 2.0))  # timed: the fault comes at a random moment
    if Path(f"/proc/{ranks[0]}").exists():
        os.kill(ranks[0], signal.SIGKILL)
    killed_at = time.monotonic()
    loading.join(90)
    assert len(found) == 1
    assert found[0] is None or "rank 1 is gone" in str(found[0])
    if found[0] is not None:
        assert time.monotonic() - killed_at < IN_TIME_S
    assert not children()
    assert not segments()
