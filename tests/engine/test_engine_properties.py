"""Random arrivals, lengths, priorities, aborts, forks and beams over a cache that is too small for them."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from octavo.engine.engine import Engine, Output, RequestFailure
from octavo.engine.step_budget import MIN_PREFILL_TOKENS, StepBudget
from octavo.engine.step_times import StepTimes
from octavo.errors import UsageError
from octavo.generation_request import Params, PoolingParams
from octavo.outputs import OutputDelta, PoolingOutput
from octavo.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams
from tests.support.drafting import AnyPolicy, DraftingSampler, ScriptedSource, with_drafts
from tests.support.fake_executor import FakeExecutor, create_request, fake_engine
from tests.support.integrity import check_integrity

MAX_MODEL_LEN = 40
Spec = tuple[tuple[int, ...], str, int, int, int]  # prompt, kind, width or n, max_tokens, seed


def make_params(spec: Spec) -> Params:
    _, kind, count, max_tokens, seed = spec
    if kind == "beams":
        return BeamSearchParams(beam_width=count, max_tokens=max_tokens)
    if kind == "pooling":
        return PoolingParams(pooling="mean" if count % 2 else "last")
    return SamplingParams(
        n=count,
        max_tokens=max_tokens,
        seed=seed,
        temperature=0.0 if kind == "greedy" else 1.0,
        frequency_penalty=0.5 if kind in ("penalty", "drafts") else 0.0,
        prompt_logprobs=1 if kind == "logprobs" else None,
        logprobs=2 if kind in ("logprobs", "drafts", "stops") else None,
        stop=["a", "bc", "de"] if kind in ("stops", "drafts") else (),
        min_tokens=min(3, max_tokens) if kind == "drafts" else 0,
        output_kind=RequestOutputKind.FINAL_ONLY,
        structured_outputs=StructuredOutputsParams(regex="[a-f]{3,20}|[x-z]{2}") if kind == "grammar" else None,
    )


@cache
def alone(spec: Spec) -> OutputDelta | PoolingOutput:
    """The same request with all the room in the world."""
    engine = fake_engine(num_blocks=512, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=512, max_num_seqs=64)
    engine.add_request(create_request(engine, "alone", spec[0], make_params(spec)))
    while engine.has_work:
        for output in engine.step():
            last = output
    assert not isinstance(last, RequestFailure)
    return last


def answers(output: OutputDelta) -> list[tuple[int, list[int], str, str | None]]:
    return [(choice.index, choice.token_ids, choice.text, choice.finish_reason) for choice in output.outputs]


class AnyBudget(StepBudget):
    """Bounds the chunks of each step as it likes."""

    def __init__(self, seed: int) -> None:
        super().__init__(0.2, StepTimes())
        self._random = random.Random(seed)

    def lets_in(self, num_decodes: int) -> bool:
        return not num_decodes or self._random.random() < 0.8

    def max_prefill_tokens(self, num_decodes: int, context: int, missing: int, to_compute: int) -> int:  # noqa: ARG002
        return self._random.randint(MIN_PREFILL_TOKENS // 2, 30)


class EngineMachine(RuleBasedStateMachine):
    engine: Engine
    executor: Any  # one that counts its steps and has `is_deferred`, as `FakeExecutor`
    may_draft = True

    def make_engine(self, num_blocks: int, windows: tuple[int | None, ...], num_stages: int, **limits: Any) -> Engine:
        executor = FakeExecutor(windows, num_stages=num_stages)
        return fake_engine(num_blocks=num_blocks * len(set(windows)), executor=executor, **limits)

    def alone(self, spec: Spec) -> OutputDelta | PoolingOutput:
        return alone(spec)

    @initialize(
        num_blocks=st.integers(10, 24),
        prefix_caching=st.booleans(),
        max_num_seqs=st.integers(3, 8),
        step_limits=st.tuples(st.integers(8, 20), st.integers(8, 12)),
        seeds=st.tuples(*[st.none() | st.integers(0, 99)] * 2),  # of the budget, and of drafts
        flight=st.sampled_from([(0, 1), (1, 1), (2, 1), (1, 2), (1, 3)]),  # steps left to run on, and stages
        windows=st.sampled_from([(None,), (None, 5), (9, 9, None, None, 2, 2)]),
    )
    def start(
        self,
        num_blocks: int,
        prefix_caching: bool,
        max_num_seqs: int,
        step_limits: tuple[int, int],
        seeds: tuple[int | None, int | None],
        flight: tuple[int, int],
        windows: tuple[int | None, ...],
    ) -> None:
        self.engine = self.make_engine(
            num_blocks,
            windows,
            flight[1],
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=step_limits[0],
            max_num_outputs=step_limits[1],
            enable_prefix_caching=prefix_caching,
        )
        budget_seed, draft_seed = seeds
        if budget_seed is not None:
            self.engine.scheduler.step_budget = AnyBudget(budget_seed)
        self.executor = self.engine.executor
        self.executor.is_deferred, self.executor.max_in_flight = flight[0] > 0, max(flight[0], 1)
        self.specs: dict[str, Spec] = {}
        self.scripts: dict[str, list[list[int]]] | None = None
        if draft_seed is not None and self.may_draft:
            self.scripts, chance = {}, random.Random(draft_seed)
            source = ScriptedSource(self.scripts, lambda _: chance.random() < 0.8)
            with_drafts(self.engine, source, AnyPolicy(draft_seed))
        self.finished: dict[str, OutputDelta] = {}
        self.count = 0

    @rule(
        prefix=st.tuples(st.integers(0, 20), st.sampled_from([4, 5, 64])),
        tail=st.lists(st.integers(2, 63), min_size=1, max_size=12),
        kind=st.sampled_from(
            ["greedy", "random", "penalty", "logprobs", "grammar", "beams", "pooling", "stops", "drafts"]
        ),
        count=st.integers(1, 4),
        max_tokens=st.integers(1, 30),
        seed=st.integers(0, 3),
        priority=st.integers(-1, 1),
    )
    def add(
        self,
        prefix: tuple[int, int],
        tail: list[int],
        kind: str,
        count: int,
        max_tokens: int,
        seed: int,
        priority: int,
    ) -> None:
        # Prompts share prefixes, so that the prefix cache has something to do; with a period of one block they
        # repeat blocks too, which are equal only in what they hold.
        length, period = prefix
        shared = tuple(2 + i % period for i in range(length))
        spec = (shared + tuple(tail), kind, count, max_tokens, seed)
        self.count += 1
        try:
            request = create_request(self.engine, f"r{self.count}", spec[0], make_params(spec), priority=priority)
        except UsageError:
            event("refused")
            return
        if self.scripts is not None and kind not in ("beams", "pooling"):
            expected = self.alone(spec)
            assert isinstance(expected, OutputDelta)
            self.scripts[request.request_id] = [choice.token_ids for choice in expected.outputs]
        elif kind == "drafts" and self.may_draft:
            expected = self.alone(spec)
            assert isinstance(expected, OutputDelta)
            for group, choice in zip(request.groups, expected.outputs, strict=True):
                group.consumers = (DraftingSampler(choice.token_ids, self.count),)
        self.engine.add_request(request)
        self.specs[request.request_id] = spec

    @precondition(lambda self: self.specs)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.specs)))
        output = self.engine.abort(request_id)
        assert output is not None
        assert isinstance(output, RequestFailure) or output.finished
        del self.specs[request_id]

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            before, had_news = self.executor.num_steps, self.executor.is_deferred
            for output in self.round():
                assert not isinstance(output, RequestFailure)
                assert output.finished
                self.check(output)
                had_news = True
            self.check_blocks()
            assert self.executor.num_steps > before or had_news or not self.specs, "nothing moves"

    def round(self) -> list[Output]:
        if not self.executor.is_deferred:
            return self.engine.step()
        self.engine.start()
        self.check_blocks()
        outputs = self.engine.publish()
        self.check_blocks()
        self.engine.prepare()
        self.check_blocks()
        self.engine.finish()
        return outputs

    def check_blocks(self) -> None:
        engine = self.engine
        steps = [*engine._in_flight, *([] if engine._ended is None else [engine._ended])]
        check_integrity(engine.scheduler, [step.schedule for step in steps])

    def check(self, output: OutputDelta | PoolingOutput) -> None:
        spec = self.specs.pop(output.request_id)
        expected = self.alone(spec)
        if isinstance(output, PoolingOutput):
            assert isinstance(expected, PoolingOutput)
            assert output.vector == pytest.approx(expected.vector, rel=1e-6)  # by chunks, sums of float64 differ
            return
        assert isinstance(expected, OutputDelta)
        assert answers(output) == answers(expected)
        self.check_logprobs(output.prompt_logprobs, expected.prompt_logprobs)
        for found, wanted in zip(output.outputs, expected.outputs, strict=True):
            self.check_logprobs(found.logprobs, wanted.logprobs)

    def check_logprobs(self, found: Any, expected: Any) -> None:
        """Of the tokens of a prompt or of an answer."""
        assert found == expected

    @invariant()
    def blocks_are_whole(self) -> None:
        if hasattr(self, "engine"):
            self.check_blocks()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(5000):
            if not self.specs:
                break
            self.step(1)
        assert not self.specs, "not every request finishes"
        while self.engine.has_work:
            self.round()
        assert not self.engine.admission.running
        assert self.engine.scheduler.kv_cache.pool.num_used_blocks == 0


_SETTINGS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], stateful_step_count=30)

TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(_SETTINGS, max_examples=25)


@pytest.mark.slow
def test_many_more_runs() -> None:
    run_state_machine_as_test(EngineMachine, settings=settings(_SETTINGS, max_examples=600))
