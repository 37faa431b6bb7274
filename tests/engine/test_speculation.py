"""Drafts of the engine's own sources: the answers without them, in less time, and prompts never wait for them."""

from __future__ import annotations

import random
import re
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.batch import Batch, StepOutput
from octavo.engine import engine as engine_module
from octavo.engine.engine import Engine
from octavo.engine.limits import EngineLimits
from octavo.engine.metrics import EngineMetrics
from octavo.engine.request import RequestStatus
from octavo.engine.speculation.draft_source import DraftSource
from octavo.engine.speculation.ngram import NgramSource
from octavo.engine.speculation.speculation import Speculation
from octavo.engine.step_times import StepTimes
from octavo.generation_request import RequestOptions
from octavo.outputs import OutputDelta
from octavo.prompt import Prompt
from octavo.sampling_params import SamplingParams, StructuredOutputsParams
from tests.support.answers import Answers
from tests.support.drafting import AnyPolicy, ScriptedSource, with_drafts
from tests.support.fake_executor import EOS_ID, VOCAB_SIZE, FakeExecutor, FakeTokenizer, create_request, fake_engine
from tests.support.integrity import check_integrity

PROMPT = [5, 6, 7, 8, 9, 10]
BASE = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.7, seed=4, logprobs=2)
KINDS = {
    "greedy": replace(BASE, temperature=0.0),
    "seeded": replace(BASE, seed=11, top_p=0.9, top_k=40, min_p=0.01),
    "typical": replace(BASE, typical_p=0.8),
    "penalties": replace(BASE, frequency_penalty=1.0, presence_penalty=0.5, repetition_penalty=1.2),
    "bias": replace(BASE, logit_bias={7: 5.0, 9: -3.0}),
    "allowed": replace(BASE, allowed_token_ids=list(range(4, 40))),
    "bad words": replace(BASE, bad_words=["a", "bc"]),
    "min tokens": replace(BASE, ignore_eos=False, min_tokens=12, logit_bias={EOS_ID: 4.0}),
    "stop token": replace(BASE, stop_token_ids=[20, 21, 22, 23]),
    "stop string": replace(BASE, stop=["b", "cd", "x"]),
    "grammar": replace(BASE, structured_outputs=StructuredOutputsParams(regex="[a-f]{8,20}x?[g-k]{2,9}")),
    "n": replace(BASE, n=3),
    "prompt logprobs": replace(BASE, prompt_logprobs=1),
}
DRAFTS: dict[str, Callable[[int], bool]] = {
    "right": lambda _: True,
    "wrong": lambda _: False,
    "mixed": lambda position: position % 3 != 1,
}
ROOMY: dict[str, Any] = {"max_model_len": 64, "num_blocks": 256}
ENGINES: dict[str, dict[str, Any]] = {
    "roomy": ROOMY,
    "chunks": {**ROOMY, "max_num_batched_tokens": 8, "max_num_seqs": 4},
    "preemption": {"max_model_len": 64, "num_blocks": 17},
}


def answers(params: SamplingParams, engine: Engine, names: list[str]) -> dict[str, Any]:
    """Of requests with prompts that share their beginning, one of which comes later and finds it in the cache."""
    found = Answers()
    requests = [
        create_request(engine, name, [*PROMPT, *PROMPT, 11 + i], replace(params, seed=(params.seed or 0) + i))
        for i, name in enumerate(names)
    ]
    for request in requests[:-1]:
        engine.add_request(request)
    for _ in range(4):
        found.take(engine.step())
    engine.add_request(requests[-1])
    while engine.has_work:
        found.take(engine.step())
        check_integrity(engine.scheduler)
    outputs = {}
    for name, answer in found.items():
        assert isinstance(answer, OutputDelta), answer
        outputs[name] = answer.outputs, answer.prompt_logprobs
    return outputs


@pytest.mark.parametrize("engine_name", ENGINES)
@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_answers_are_those_without_drafts(kind: str, drafts: str, engine_name: str) -> None:
    params, names = KINDS[kind], ["a", "b", "c"]
    expected = answers(params, fake_engine(**ROOMY), names)
    script = {name: [choice.token_ids for choice in choices] for name, (choices, _) in expected.items()}
    wrong = 12 if kind == "grammar" else 9  # 12 is `h`, which the grammar forbids at first
    engine = with_drafts(
        fake_engine(**ENGINES[engine_name]), ScriptedSource(script, DRAFTS[drafts], wrong), AnyPolicy(3)
    )
    assert answers(params, engine, names) == expected
    metrics = engine.metrics
    drafted, right = (
        counts.get("script", 0) for counts in (metrics.num_draft_tokens_total, metrics.num_accepted_draft_tokens_total)
    )
    if engine_name == "preemption" and kind in ("greedy", "n", "penalties"):  # others may end before
        assert metrics.num_preemptions_total
    if drafts == "right":
        assert drafted >= right > 0
    if drafts == "wrong" and kind != "grammar":
        assert drafted > 0


def limited(options: RequestOptions, is_right: Callable[[int], bool] = lambda _: True) -> EngineMetrics:
    """The metrics after an answer of 30 tokens whose request limits its drafts; the answer is that without."""
    params = replace(BASE, temperature=0.0)
    expected = answers(params, fake_engine(**ROOMY), ["a"])
    source = ScriptedSource({"a": [expected["a"][0][0].token_ids]}, is_right)
    engine = with_drafts(fake_engine(**ROOMY), source, AnyPolicy(0, least=5))
    found = Answers()
    request = create_request(engine, "a", [*PROMPT, *PROMPT, 11], params)
    request.options = options
    engine.add_request(request)
    while engine.has_work:
        found.take(engine.step())
    answer = found["a"]
    assert isinstance(answer, OutputDelta)
    assert answer.outputs == expected["a"][0]
    return engine.metrics


def test_a_request_limits_its_drafts() -> None:
    assert set(limited(RequestOptions()).num_accepted_by_position_total) == set("01234")
    assert set(limited(RequestOptions(num_speculative_tokens=2)).num_accepted_by_position_total) == set("01")
    assert limited(RequestOptions(num_speculative_tokens=0)).num_drafts_total == 0
    # There are at most five; 30 tokens leave fewer at the end.
    assert limited(RequestOptions(min_speculative_tokens=6)).num_drafts_total == 0
    metrics = limited(RequestOptions(min_speculative_tokens=5))
    assert metrics.num_draft_tokens_total["script"] == 5 * metrics.num_drafts_total > 0


def test_guesses_below_the_probability_of_a_request_are_not_computed() -> None:
    assert limited(RequestOptions(speculative_p_min=1.0)).num_drafts_total == 0
    likely, unlikely = (
        limited(RequestOptions(speculative_p_min=0.45), is_right).num_drafts_total
        for is_right in (lambda _: True, lambda position: position % 3 == 0)
    )
    assert 0 < unlikely < likely  # the source assumes 0.5 at first, and what was wrong counts


def test_only_drafts_that_a_step_computed_are_counted() -> None:
    params = replace(BASE, max_tokens=20)
    expected = answers(params, fake_engine(**ROOMY), ["a", "b"])
    script = {name: [choice.token_ids for choice in choices] for name, (choices, _) in expected.items()}
    engine = with_drafts(fake_engine(**ROOMY), ScriptedSource(script), AnyPolicy(0, least=5))
    answers(params, engine, ["a", "b"])
    metrics = engine.metrics
    # The first token comes with the prompt, then six in a step: 1 + 3 * 6 and one more.
    assert metrics.num_drafts_total == 2 * 3
    assert metrics.num_draft_tokens_total == metrics.num_accepted_draft_tokens_total == {"script": 2 * 15}
    assert metrics.num_accepted_by_position_total == {str(i): 6 for i in range(5)}


# --- time ---

PROFILES: dict[str, list[float]] = {  # of a step of 1, 2, ... rows; beyond the last, each row adds as the last did
    "vnni": [1.0, 1.0, 1.03, 1.06, 1.15, 1.27, 1.38, 1.5, 1.7, 1.9, 2.1, 2.3, 2.5, 2.7, 2.9, 3.1],
    "amx": [1.0, 1.03, 1.06, 1.1, 1.12, 1.14, 1.16, 1.18, 1.21, 1.25, 1.28, 1.32, 1.35, 1.39, 1.43, 1.47],
    "avx2": [1.0, 1.07, 1.25, 1.45, 1.7, 2.0, 2.25, 2.5, 2.75, 3.0, 3.2, 3.4, 3.7, 3.9, 4.2, 4.4],
    "linear": [1.0, 2.0],
    "cliff": [1.0, 2.5, 2.5, 2.5],
}


class PricedExecutor(FakeExecutor):
    """An executor whose steps take the time of their rows, by a clock of its own; prompt tokens are as dear as rows."""

    def __init__(self, costs: list[float], scatter: float = 0.02) -> None:
        super().__init__()
        self.costs = costs
        self.now_s = 0.0
        self._random, self._scatter = random.Random(1), scatter

    def cost(self, num_rows: int) -> float:
        costs = self.costs
        beyond = max(num_rows - len(costs), 0)
        slope = costs[-1] - costs[-2]
        return 0.025 * (costs[min(num_rows, len(costs)) - 1] + slope * beyond)

    def compute(self, batch: Batch) -> StepOutput:
        self.now_s += self.cost(len(batch.token_ids)) * (1 + self._scatter * self._random.random())
        return super().compute(batch)


def priced_engine(monkeypatch: pytest.MonkeyPatch, costs: list[float]) -> tuple[Engine, PricedExecutor]:
    executor = PricedExecutor(costs)
    executor.allocate_cache(2048, 16)
    monkeypatch.setattr(engine_module.time, "perf_counter", lambda: executor.now_s)
    limits = EngineLimits(1024, 16, 256, 128, 16, 2048, VOCAB_SIZE, max_itl_s=0.2)
    return Engine(executor, FakeTokenizer(), limits), executor


def seconds(
    monkeypatch: pytest.MonkeyPatch, costs: list[float], users: int, script: dict[str, list[list[int]]], odds: Any
) -> float:
    """The time of the answers to so many users at once. odds: None, or of a position: whether its draft is right."""
    engine, executor = priced_engine(monkeypatch, costs)
    if odds is not None:
        with_drafts(engine, ScriptedSource(script, odds, wrong=-1 % VOCAB_SIZE))
    params = SamplingParams(max_tokens=300, ignore_eos=True, temperature=0.0)
    for i in range(users):
        engine.add_request(create_request(engine, f"r{i}", [5, 6, 7 + i], params))
    found = Answers()
    while engine.has_work:
        found.take(engine.step())
    for name, answer in found.items():
        assert isinstance(answer, OutputDelta)
        script.setdefault(name, [answer.outputs[0].token_ids])
        assert script[name] == [answer.outputs[0].token_ids]
    return executor.now_s


def at(share: float) -> Callable[[int], bool]:
    chance = random.Random(5)
    return lambda _: chance.random() < share


@pytest.mark.parametrize("users", [1, 2, 8])
@pytest.mark.parametrize("profile", PROFILES)
def test_drafts_never_cost_time(monkeypatch: pytest.MonkeyPatch, profile: str, users: int) -> None:
    script: dict[str, list[list[int]]] = {}
    without = seconds(monkeypatch, PROFILES[profile], users, script, None)
    for share in (0.0, 0.3, 0.6, 0.9, 1.0):
        assert seconds(monkeypatch, PROFILES[profile], users, script, at(share)) < 1.02 * without, share


@pytest.mark.parametrize(
    ("profile", "users", "share", "gain"),
    [("vnni", 1, 0.9, 2.8), ("vnni", 1, 0.6, 1.5), ("amx", 1, 0.9, 3.0), ("avx2", 1, 0.9, 1.7), ("amx", 4, 0.9, 1.7)],
)
def test_right_drafts_gain_what_the_times_of_rows_allow(
    monkeypatch: pytest.MonkeyPatch, profile: str, users: int, share: float, gain: float
) -> None:
    script: dict[str, list[list[int]]] = {}
    without = seconds(monkeypatch, PROFILES[profile], users, script, None)
    assert seconds(monkeypatch, PROFILES[profile], users, script, at(share)) < without / gain


def words_of(text: str) -> list[int]:
    """Numbers for its words and signs, about as a tokenizer divides code."""
    found: dict[str, int] = {}
    return [found.setdefault(word, len(found)) for word in re.findall(r" ?\w{1,8}|\s+|[^\w\s]", text)]


def gain_of(speculation: Speculation, times: StepTimes, tokens: list[int], costs: list[float]) -> float:
    """The time of a step for each token of an answer over that with guesses. The first 40 tokens are the prompt."""
    request = SimpleNamespace(options=RequestOptions(), max_total_tokens=len(tokens), num_drafts={}, is_measured=False)
    request.prompt = Prompt(tokens[:40])
    running = SimpleNamespace(request=request, token_ids=tokens[:41], num_output_tokens=1, guesses=None)
    running.status, running.num_computed_tokens, running.draft_token_ids = RequestStatus.RUNNING, 40, []
    running.group = SimpleNamespace(members=[running], consumers=[SimpleNamespace(takes_drafts=True)])
    spent = 0.0
    while (count := len(running.token_ids)) < len(tokens):
        running.num_computed_tokens, running.num_output_tokens = count - 1, count - 40
        speculation.propose([running], 64, may_explore=True)  # type: ignore[list-item]
        drafts = running.draft_token_ids[: len(tokens) - count - 1]
        pairs = enumerate(zip(drafts, tokens[count:], strict=False))
        right = next((i for i, (draft, token) in pairs if draft != token), len(drafts))
        times.observe(1 + len(drafts), 0, 0, costs[len(drafts)])
        spent += costs[len(drafts)]
        running.token_ids += tokens[count : count + right + 1]
    return (len(tokens) - 41) * costs[0] / spent


@pytest.mark.parametrize("profile", ["vnni", "amx", "avx2"])
def test_the_first_guesses_of_ngrams_cost_no_code_text_time(profile: str) -> None:
    """Beginnings of real files, as new code has few repetitions; nothing is known of a source at first."""
    gains = []
    for path in sorted(Path(engine_module.__file__).parent.glob("*.py")):
        if len(tokens := words_of(path.read_text()[:3000])) >= 170:
            times = StepTimes()
            speculation = Speculation([NgramSource()], times, EngineMetrics(num_blocks=1))
            gains.append(gain_of(speculation, times, tokens[:170], PROFILES[profile]))
    assert len(gains) > 10
    assert min(gains) > 0.98
    assert statistics.geometric_mean(gains) > 1.02


def test_a_source_that_was_wrong_is_used_again_once_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses are compared with the tokens also while no step computes them."""
    script: dict[str, list[list[int]]] = {}
    costs = PROFILES["avx2"]
    without = seconds(monkeypatch, costs, 1, script, None)
    late = seconds(monkeypatch, costs, 1, script, lambda position: position >= 150)
    assert late < 0.85 * without


def test_a_time_that_was_once_long_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program has slowed down the first step with drafts."""
    script: dict[str, list[list[int]]] = {}
    without = seconds(monkeypatch, PROFILES["vnni"], 1, script, None)
    compute = PricedExecutor.compute
    slowed: list[int] = []

    def slow(self: PricedExecutor, batch: Batch) -> StepOutput:
        if len(batch.token_ids) == 2 and not slowed:
            slowed.append(self.num_steps)
            self.now_s += 1.0
        return compute(self, batch)

    monkeypatch.setattr(PricedExecutor, "compute", slow)
    assert seconds(monkeypatch, PROFILES["vnni"], 1, script, at(1.0)) - 1.0 < 0.75 * without
    assert slowed


@pytest.mark.parametrize("users", [1, 4])
def test_prompts_are_admitted_beside_endless_drafts(monkeypatch: pytest.MonkeyPatch, users: int) -> None:
    script: dict[str, list[list[int]]] = {}
    seconds(monkeypatch, PROFILES["amx"], users, script, None)
    engine, _ = priced_engine(monkeypatch, PROFILES["amx"])
    with_drafts(engine, ScriptedSource(script, at(0.9)))
    params = SamplingParams(max_tokens=300, ignore_eos=True, temperature=0.0)
    for i in range(users):
        engine.add_request(create_request(engine, f"r{i}", [5, 6, 7 + i], params))
    waits = []
    while engine.has_work:
        engine.step()
        running = engine.admission.running
        if len(waits) < 6 and len(running) == users and running[0].num_output_tokens > 30 * (len(waits) + 1):
            late = create_request(engine, f"late{len(waits)}", [30 + len(waits)] * 20, replace(params, max_tokens=1))
            engine.add_request(late)
            waits.append(0)
            while late.num_generated_tokens == 0:
                engine.step()
                waits[-1] += 1
    assert len(waits) >= 4
    assert max(waits) <= 3
    assert engine.metrics.num_accepted_draft_tokens_total["script"] > 200 * users


def test_nobody_guesses_in_a_crowd() -> None:
    class NoSource(DraftSource):
        """Fails the test if it is asked."""

        def open(self, sequence: object) -> None:
            raise AssertionError(sequence)

    crowd = [SimpleNamespace(draft_token_ids=[1], token_ids=[1], num_computed_tokens=0) for _ in range(17)]
    speculation = Speculation([NoSource.__new__(NoSource)], StepTimes(), EngineMetrics(num_blocks=1))
    assert not speculation.would_draft(crowd, [0] * 17)  # type: ignore[arg-type]
    assert not speculation.may_draft_next(crowd)  # type: ignore[arg-type]
