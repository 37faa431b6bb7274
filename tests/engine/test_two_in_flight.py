"""Two steps in flight: the answers of the loop with one, whenever the device computes and whoever comes and goes."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from octavo.backends import Executor, ExecutorLimits, PendingStep
from octavo.backends.torch.compile import TorchBackend
from octavo.batch import Batch
from octavo.engine.engine import Engine, Output, RequestFailure
from octavo.generation_request import Params
from octavo.outputs import OutputDelta
from octavo.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams
from tests.engine.test_model_runs import VOCAB_SIZE, tiny_engine
from tests.support.answers import Answers, answers_of
from tests.support.drafting import AnyPolicy, ScriptedSource, with_drafts
from tests.support.fake_executor import EOS_ID, FakeExecutor, create_request, fake_engine
from tests.support.late_steps import LateExecutor
from tests.support.tiny_models import tiny_graph
from tests.support.traced_steps import TracedReplay

FINAL = SamplingParams(temperature=0, max_tokens=9, output_kind=RequestOutputKind.FINAL_ONLY)
KINDS: list[Params] = [
    FINAL,
    replace(FINAL, temperature=1.0, seed=3, top_k=40, top_p=0.95, max_tokens=14),
    replace(FINAL, temperature=0.8, seed=5, logprobs=2, prompt_logprobs=1),
    replace(FINAL, frequency_penalty=0.7, repetition_penalty=1.2),
    replace(FINAL, structured_outputs=StructuredOutputsParams(regex="[a-f]{3,9}|[x-z]{2}")),
    replace(FINAL, stop=["A", "bc"], temperature=1.0, seed=1),
    replace(FINAL, temperature=1.0, seed=2, n=2),
    replace(FINAL, max_tokens=1),
    BeamSearchParams(beam_width=2, max_tokens=5),
]


def turn(engine: Engine) -> list[Output]:
    engine.start()
    outputs = engine.publish()
    engine.prepare()
    engine.finish()
    return outputs


class CountedExecutor:
    """An executor that takes two steps by itself. num_ahead: steps that took tokens of the one before."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.num_ahead = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def submit(self, batch: Batch) -> PendingStep:
        self.num_ahead += batch.token_sources is not None
        return self._executor.submit(batch)


def late_engine(name: str, backend: str, seed: int) -> tuple[Engine, LateExecutor | CountedExecutor]:
    engine = tiny_engine(name, backend, num_blocks=44, max_num_batched_tokens=16, max_num_seqs=5)
    if backend == "torch" and seed % 2:  # with captured steps
        device = TorchBackend(torch.device("cpu"), torch.float64, torch.float64, TracedReplay)
        engine.executor = device.compile(*tiny_graph(name), ExecutorLimits(16, 5, 9, 64))
        engine.executor.allocate_cache(44, 4, 10)
    if backend == "cpu":
        engine.executor = counted = cast("Any", CountedExecutor(engine.executor))
        return engine, counted
    engine.executor = late = LateExecutor(engine.executor, seed, takes_sources=backend == "torch")
    return engine, late


def ending(engine: Engine, found: Answers | None = None) -> Answers:
    """The answers, added to those found before."""
    found = Answers() if found is None else found
    while engine.has_work:
        found.take(turn(engine))
    return found


@pytest.mark.parametrize(
    ("name", "backend", "seed"),
    [
        ("llama", "reference", 0),
        ("llama", "torch", 2),
        *((name, "cpu", seed) for name in ("llama", "qwen35", "gemma3") for seed in (1, 2)),
        pytest.param("llama", "torch", 1, marks=pytest.mark.slow),
        *(pytest.param("llama", backend, seed, marks=pytest.mark.slow)
          for backend in ("reference", "torch") for seed in range(3, 9)),
        *(pytest.param(name, "torch", seed, marks=pytest.mark.slow)
          for name in ("lfm2", "qwen35", "gemma3") for seed in (1, 2)),
    ],
)  # fmt: skip
def test_answers_are_those_of_one_step_at_a_time(
    name: str, backend: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.backends.cpu.executor.SHORT_STEP_S", 60.0)  # this machine may be busy
    rng = random.Random(seed)
    (engine, late), alone = late_engine(name, backend, seed), tiny_engine(name, backend)
    shared = [(7 * i) % VOCAB_SIZE for i in range(12)]
    specs = []
    for _ in range(14):
        own = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 9))]
        (kind,) = rng.choices(KINDS, [6, 6, 4, 1, 1, 3, 1, 2, 1])
        specs.append((shared[: rng.choice([0, 0, 4, 12])] + own, kind))
    found = Answers()
    for i, (prompt, params) in enumerate(specs):
        engine.add_request(create_request(engine, str(i), prompt, params))
        for _ in range(rng.randint(0, 4)):
            found.take(turn(engine))
        if rng.random() < 0.15 and (output := engine.abort(str(rng.randrange(i + 1)))) is not None:
            found.take([output])
    ending(engine, found)
    assert late.num_ahead > 10
    num_whole = 0
    for i, (prompt, params) in enumerate(specs):
        output = found[str(i)]
        assert isinstance(output, OutputDelta)
        if output.outputs[0].finish_reason == "abort":
            continue
        alone.add_request(create_request(alone, "alone", prompt, params))
        expected = answers_of(alone)["alone"]
        assert isinstance(expected, OutputDelta)
        assert [choice.token_ids for choice in output.outputs] == [choice.token_ids for choice in expected.outputs]
        assert [choice.text for choice in output.outputs] == [choice.text for choice in expected.outputs]
        num_whole += 1
    assert num_whole > 8


@pytest.mark.parametrize("seed", [2, 3], ids=["plain", "captured"])
def test_drafts_and_two_steps_in_flight_take_turns_on_torch(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step after one with drafts waits for its tokens; other steps take theirs from where the device left them."""
    alone = tiny_engine("llama", "torch")
    kinds = [FINAL, KINDS[1], KINDS[6]]
    prompts = [[(11 * i + 7 * j) % VOCAB_SIZE for j in range(6 + i)] for i in range(len(kinds))]
    specs = [
        (prompt, replace(kind, max_tokens=24, ignore_eos=True)) for prompt, kind in zip(prompts, kinds, strict=True)
    ]
    script: dict[str, list[list[int]]] = {}
    for i, (prompt, params) in enumerate(specs):
        alone.add_request(create_request(alone, str(i), prompt, params))
        output = answers_of(alone)[str(i)]
        assert isinstance(output, OutputDelta)
        script[str(i)] = [choice.token_ids for choice in output.outputs]
    engine, late = late_engine("llama", "torch", seed)
    policy = AnyPolicy(seed, least=1)
    lengths = policy.lengths

    def in_turns(chains: Any, *rest: Any, **more: Any) -> list[int]:
        pays = engine.metrics.num_steps_total % 8 < 4
        return lengths(chains if pays else [[]] * len(chains), *rest, **more)

    monkeypatch.setattr(policy, "lengths", in_turns)
    with_drafts(engine, ScriptedSource(script, lambda position: position % 5 != 3), policy)
    for i, (prompt, params) in enumerate(specs):
        engine.add_request(create_request(engine, str(i), prompt, params))
    found = ending(engine)
    for name, output in found.items():
        assert isinstance(output, OutputDelta)
        assert [choice.token_ids for choice in output.outputs] == script[name]
    assert late.num_ahead > 3
    assert engine.metrics.num_accepted_draft_tokens_total["script"] > 10


def fake_late_engine(**limits: int) -> Engine:
    engine = fake_engine(**limits)  # type: ignore[arg-type]
    assert isinstance(engine.executor, FakeExecutor)
    engine.executor.is_deferred, engine.executor.max_in_flight = True, 2
    return engine


def test_the_next_step_is_there_before_the_first_has_ended_also_when_requests_come_and_go() -> None:
    engine = fake_late_engine(max_num_seqs=3)
    for i in range(7):
        params = replace(FINAL, max_tokens=4 + 3 * i, ignore_eos=True)
        engine.add_request(create_request(engine, str(i), [5 + i, 6, 7], params))
    num_ahead = num_steps = 0
    while engine.has_work:
        engine.start()
        engine.publish()
        engine.prepare()
        num_ahead += len(engine._in_flight) == 2
        num_steps += bool(engine._in_flight)
        engine.finish()
    assert num_steps - num_ahead <= 2


def test_a_grammar_beside_others_has_its_token_in_every_step() -> None:
    """The others wait with it; otherwise it would be in every second step only."""
    engine = fake_late_engine()
    grammar = StructuredOutputsParams(regex="[a-z]{12}")
    engine.add_request(create_request(engine, "json", [5], replace(FINAL, max_tokens=12, structured_outputs=grammar)))
    engine.add_request(create_request(engine, "plain", [6], replace(FINAL, max_tokens=30, ignore_eos=True)))
    turns, ended = 0, -1
    while engine.has_work:
        turns += 1
        if any(output.request_id == "json" for output in turn(engine)):
            ended = turns
    assert 12 <= ended <= 15


def test_after_a_row_without_an_outcome_both_steps_are_repeated() -> None:
    engine, alone = fake_late_engine(), fake_engine()
    params = replace(FINAL, max_tokens=20, ignore_eos=True)
    for each in (engine, alone):
        each.add_request(create_request(each, "good", [7, 8], params))
    for _ in range(3):
        turn(engine)
    bad = SamplingParams(allowed_token_ids=[EOS_ID], min_tokens=2)
    engine.add_request(create_request(engine, "bad", [9], bad))
    found = ending(engine)
    while alone.has_work:
        outputs = alone.step()
    assert isinstance(found["bad"], RequestFailure)
    good, expected = found["good"], outputs[0]
    assert isinstance(good, OutputDelta)
    assert isinstance(expected, OutputDelta)
    assert good.outputs == expected.outputs
    assert engine.scheduler.kv_cache.pool.num_used_blocks == 0


def test_better_priority_and_a_full_cache_still_preempt() -> None:
    engine = fake_late_engine(num_blocks=12, max_num_seqs=4)
    params = replace(FINAL, max_tokens=20, ignore_eos=True)
    for i in range(4):
        engine.add_request(create_request(engine, str(i), [5 + i] * 6, params))
    for _ in range(5):
        turn(engine)
    engine.add_request(create_request(engine, "first", [9, 9], params, priority=-1))
    order = []
    while engine.has_work:
        order += [output.request_id for output in turn(engine)]
    assert sorted(order) == ["0", "1", "2", "3", "first"]
    assert order.index("first") < min(order.index("2"), order.index("3"))  # which came before it
    assert engine.metrics.num_preemptions_total > 0
