"""The engine's own CPU time per decode step in its thread, without the executor."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import pytest

from octavo.batch import Batch, StepOutput
from octavo.engine.engine import Engine
from octavo.engine.limits import EngineLimits
from octavo.engine.speculation.ngram import NgramSource
from octavo.engine.speculation.policy import DraftPolicy
from octavo.sampling_params import RequestOutputKind, SamplingParams
from tests.support.drafting import with_drafts
from tests.support.fake_executor import VOCAB_SIZE, FakeExecutor, FakeTokenizer, create_request


class FreeStep:
    """A step that ends when somebody waits for it."""

    def __init__(self, executor: FreeExecutor, output: StepOutput) -> None:
        self._executor = executor
        self._output = output

    def wait(self) -> StepOutput:
        self._executor.ended_at = time.thread_time()
        return self._output


class FreeExecutor(FakeExecutor):
    """Always says 7, at once; counts what even that takes, and the time from the end of a step to the next one."""

    spent_s = 0.0
    ended_at = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.gaps_s: list[float] = []

    def submit(self, batch: Batch) -> FreeStep:
        self.gaps_s.append(time.thread_time() - self.ended_at)
        return FreeStep(self, self.compute(batch))

    def compute(self, batch: Batch) -> StepOutput:
        start = time.thread_time()
        rows = len(batch.logits_indices)
        none = np.zeros((rows, 0), np.int32)
        zeros = np.zeros(rows, np.float32)
        output = StepOutput(np.full(rows, 7, np.int32), zeros, np.ones(rows, np.int32), none, none.astype(np.float32))
        self.spent_s += time.thread_time() - start
        return output


def make_engine(num_seqs: int, params: SamplingParams) -> tuple[Engine, FreeExecutor]:
    """An engine that decodes."""
    executor = FreeExecutor()
    executor.allocate_cache(4096, 16)
    engine = Engine(executor, FakeTokenizer(), EngineLimits(4096, 64, 512, 80, 16, 4096, VOCAB_SIZE))
    for i in range(num_seqs):
        engine.add_request(create_request(engine, str(i), [5] * 200, params))
    for _ in range(60):
        engine.step()
    return engine, executor


class NoDrafts(DraftPolicy):
    """Looks for drafts that pay and takes none, so that all steps are alike."""

    def lengths(self, *args: Any, **options: Any) -> list[int]:
        return [0] * len(super().lengths(*args, **options))


def quietest_ms(times: list[float]) -> float:
    """The median of the quietest of ten stretches: other processes slow this one through the caches."""
    return min(statistics.median(times[i : i + 20]) for i in range(0, 200, 20)) * 1e3


@pytest.mark.slow
@pytest.mark.parametrize(("num_seqs", "limit_ms"), [(1, 0.25), (32, 1.0)])
@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_a_decode_step_costs_the_host_little(num_seqs: int, limit_ms: float, kind: RequestOutputKind) -> None:
    params = SamplingParams(max_tokens=400, ignore_eos=True, output_kind=kind)
    engine, executor = make_engine(num_seqs, params)
    times = []
    for _ in range(200):
        executor.spent_s = 0.0
        start = time.thread_time()
        engine.step()
        times.append(time.thread_time() - start - executor.spent_s)
    assert quietest_ms(times) < limit_ms


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_seqs", "limit_ms", "penalty"), [(1, 0.05, 0.0), (32, 0.1, 0.0), (1, 0.25, 1.0), (32, 1.0, 1.0)]
)
def test_the_executor_waits_little_between_steps(num_seqs: int, limit_ms: float, penalty: float) -> None:
    """Plain sequences go on with arrays prepared before; those with penalties need the token for theirs."""
    params = SamplingParams(max_tokens=400, ignore_eos=True, presence_penalty=penalty)
    engine, executor = make_engine(num_seqs, params)
    executor.gaps_s.clear()
    for _ in range(201):
        engine.start()
        engine.publish()
        engine.prepare()
        engine.finish()
    assert quietest_ms(executor.gaps_s[1:]) < limit_ms


@pytest.mark.slow
@pytest.mark.parametrize(("num_seqs", "limit_ms"), [(1, 0.35), (16, 1.0)])
def test_guesses_cost_the_host_little(num_seqs: int, limit_ms: float) -> None:
    """They are dearest beside as many sequences as get some, in answers that repeat themselves."""
    engine, executor = make_engine(num_seqs, SamplingParams(max_tokens=400, ignore_eos=True))
    with_drafts(engine, NgramSource(), NoDrafts(engine.scheduler.times))
    times = []
    for _ in range(200):
        executor.spent_s = 0.0
        start = time.thread_time()
        engine.step()
        times.append(time.thread_time() - start - executor.spent_s)
    assert engine.admission.running[0].guesses is not None
    assert quietest_ms(times) < limit_ms
