"""Steps on torch that are submitted before the host knows which guesses of the step before are right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from octavo.backends import Executor, ExecutorLimits
from octavo.backends.torch.compile import TorchBackend
from octavo.backends.torch.executor import TorchExecutor
from octavo.backends.torch.token_board import LateNumbers, TokenBoard
from octavo.batch import Batch, LateTokens
from octavo.engine.engine import Engine
from octavo.engine.speculation.model_drafter import ModelDrafter
from octavo.engine.speculation.policy import DraftPolicy
from octavo.engine.speculation.speculation import Speculation
from octavo.outputs import OutputDelta
from octavo.sampling_params import StructuredOutputsParams
from tests.engine.test_model_runs import VOCAB_SIZE, tiny_engine
from tests.engine.test_two_in_flight import FINAL, turn
from tests.support.answers import Answers, answers_of
from tests.support.drafting import AnyPolicy, ScriptedSource, with_drafts
from tests.support.fake_executor import create_request
from tests.support.host_waits import refuse_waits
from tests.support.integrity import check_integrity
from tests.support.late_steps import LateExecutor, on_late_device
from tests.support.tiny_models import tiny_graph
from tests.support.traced_steps import TracedReplay

LONG = replace(FINAL, max_tokens=24, ignore_eos=True)
KINDS = [
    LONG,
    replace(LONG, temperature=1.0, seed=3, top_k=40, top_p=0.95, max_tokens=20),
    replace(LONG, temperature=0.7, seed=5, n=2),
    replace(LONG, logprobs=2, max_tokens=17),
]
PROMPTS = [[(11 * i + 7 * j) % VOCAB_SIZE for j in range(6 + i)] for i in range(len(KINDS))]
SPECS = list(zip(PROMPTS, KINDS, strict=True))


def expected_answers(name: str, specs: list[Any]) -> dict[str, list[list[int]]]:
    """The answers of one step after another, without drafts, by the number of the request."""
    alone, found = tiny_engine(name, "torch"), {}
    for i, (prompt, params) in enumerate(specs):
        alone.add_request(create_request(alone, str(i), prompt, params))
        output = answers_of(alone)[str(i)]
        assert isinstance(output, OutputDelta)
        found[str(i)] = [choice.token_ids for choice in output.outputs]
    return found


def torch_executor(name: str, *, is_captured: bool) -> Executor:
    replay = TracedReplay if is_captured else None
    device = TorchBackend(torch.device("cpu"), torch.float64, torch.float64, replay)
    return device.compile(*tiny_graph(name), ExecutorLimits(48, 6, 40, 64))


def late_engine(name: str, *, is_captured: bool = False, num_blocks: int = 80) -> Engine:
    """An engine with two steps in flight on torch, whose executor is not yet a late one."""
    engine = tiny_engine(name, "torch", num_blocks=num_blocks, max_num_batched_tokens=48, max_num_seqs=6)
    engine.executor = torch_executor(name, is_captured=is_captured)
    engine.executor.allocate_cache(num_blocks, 4, 12)
    engine.limits = replace(engine.limits, max_num_outputs=40)
    engine.scheduler._max_num_outputs = 40
    return engine


def answers(engine: Engine, specs: list[Any], *, in_turns: bool = False) -> dict[str, list[list[int]]]:
    """Of requests that come one after another."""
    found = Answers()
    for i, (prompt, params) in enumerate(specs):
        engine.add_request(create_request(engine, str(i), prompt, params))
        for _ in range(3 if in_turns else 0):
            found.take(turn(engine))
    while engine.has_work:
        found.take(turn(engine))
        check_integrity(engine.scheduler, [step.schedule for step in engine._in_flight])
    assert all(isinstance(each, OutputDelta) for each in found.values())
    return {
        name: [choice.token_ids for choice in each.outputs]
        for name, each in found.items()
        if isinstance(each, OutputDelta)
    }


@pytest.mark.parametrize(
    ("name", "is_captured"),
    [("llama", False), ("llama", True), ("gemma3", False), pytest.param("gemma3", True, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_device_finds_the_guesses_that_are_right(
    name: str, is_captured: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step after one with guesses has positions, slots, lengths, tokens and draws from what the device accepts."""
    monkeypatch.setattr(Speculation, "_may_match_next", lambda _, each: not any(one.draft_token_ids for one in each))
    script = expected_answers(name, SPECS)
    engine = late_engine(name, is_captured=is_captured)
    engine.executor = late = LateExecutor(engine.executor, seed, takes_sources=True)
    with_drafts(engine, ScriptedSource(script, lambda position: position % 5 != 3), AnyPolicy(seed, least=1))
    assert answers(engine, SPECS, in_turns=True) == script
    assert late.num_late > 8
    drafted, right = (
        counts["script"]
        for counts in (engine.metrics.num_draft_tokens_total, engine.metrics.num_accepted_draft_tokens_total)
    )
    assert 10 < right < drafted
    assert engine.scheduler.kv_cache.pool.num_used_blocks == 0


@pytest.fixture
def free_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses and rows cost nothing: as many are made as there is room for."""
    monkeypatch.setattr(ModelDrafter, "pays", lambda *_: True)
    monkeypatch.setattr(ModelDrafter, "_cost", lambda *_: 0.0)
    monkeypatch.setattr(DraftPolicy, "lengths", AnyPolicy(1, least=1).lengths)


def drafting_engine(name: str, seed: int, **options: Any) -> tuple[Engine, LateExecutor, LateExecutor]:
    """An engine with the same model as its draft model, and both executors on one late device."""
    engine = late_engine(name, **options)
    engine.speculate([])
    engine.draft_with(torch_executor("llama", is_captured=options.get("is_captured", False)))
    late, draft = on_late_device(engine, seed)
    return engine, late, draft


@pytest.mark.usefixtures("free_guesses")
@pytest.mark.parametrize("is_captured", [False, True], ids=["plain", "captured"])
@pytest.mark.parametrize("seed", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_guesses_of_a_draft_model_go_to_the_next_step_on_the_device(seed: int, is_captured: bool) -> None:
    """The step after one with guesses, its own guesses with it, is submitted before the host knows any of them."""
    script = expected_answers("llama", SPECS)
    engine, late, draft = drafting_engine("llama", seed, is_captured=is_captured)
    assert answers(engine, SPECS, in_turns=True) == script
    assert late.num_late > 8
    assert draft.num_late > late.num_late  # all guesses of a step but for the first follow at moved positions
    drafted, right = (
        counts["draft_model"]
        for counts in (engine.metrics.num_draft_tokens_total, engine.metrics.num_accepted_draft_tokens_total)
    )
    assert 20 < right < drafted
    assert engine.scheduler.kv_cache.pool.num_used_blocks == 0


@pytest.mark.usefixtures("free_guesses")
def test_a_draft_model_that_is_the_model_itself_is_always_right() -> None:
    """It would not be if it read a token at a wrong position, or not at all."""
    specs = [(prompt, LONG) for prompt in PROMPTS]
    engine, late, _ = drafting_engine("llama", 4)
    assert answers(engine, specs) == expected_answers("llama", specs)
    metrics = engine.metrics
    assert metrics.num_draft_tokens_total == metrics.num_accepted_draft_tokens_total
    assert late.num_late > 2
    assert metrics.num_draft_tokens_total["draft_model"] > 40


@pytest.mark.usefixtures("free_guesses")
@pytest.mark.parametrize("seed", [1, 2])
def test_grammars_penalties_aborts_and_preemptions_beside_late_guesses(seed: int) -> None:
    regex = StructuredOutputsParams(regex="[a-f]{3,9}|[x-z]{2}")
    more = [replace(LONG, structured_outputs=regex, ignore_eos=False), replace(LONG, repetition_penalty=1.3)]
    specs = [*SPECS, *((prompt, params) for prompt, params in zip(PROMPTS, more, strict=False)), *SPECS]
    expected = expected_answers("llama", specs)
    engine, late, _ = drafting_engine("llama", seed, num_blocks=20)
    found = Answers()
    for i, (prompt, params) in enumerate(specs):
        engine.add_request(create_request(engine, str(i), prompt, params))
        found.take(turn(engine))
        if i % 4 == 3:
            engine.abort(str(i))
        check_integrity(engine.scheduler, [step.schedule for step in engine._in_flight])
    while engine.has_work:
        found.take(turn(engine))
    for name, output in found.items():
        assert isinstance(output, OutputDelta)
        if output.outputs[0].finish_reason != "abort":
            assert [choice.token_ids for choice in output.outputs] == expected[name]
    assert late.num_late > 2
    assert engine.metrics.num_preemptions_total


@pytest.mark.usefixtures("free_guesses")
@pytest.mark.parametrize("at", ["submit", "wait"])
def test_a_draft_model_that_fails_on_the_device_changes_no_answer(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, late, draft = drafting_engine("llama", 1)
    submit, compute = draft.submit, draft._compute

    def failing(batch: Batch) -> Any:
        if draft.num_late > 4:
            raise RuntimeError("killed")
        return (submit if at == "submit" else compute)(batch)

    monkeypatch.setattr(draft, "submit" if at == "submit" else "_compute", failing)
    assert answers(engine, SPECS) == expected_answers("llama", SPECS)
    assert engine.speculation is not None
    assert engine.speculation.drafter is None
    assert engine.metrics.num_lost_draft_models == 1
    assert late.num_late > 2


def test_a_guess_counts_if_all_before_it_are_right() -> None:
    board = TokenBoard(8, 12, 50, torch.device("cpu"))
    board.keep_computed(torch.tensor([1, 10, 11, 12, 2, 20, 21, 3]))
    board.keep_drawn(torch.tensor([10, 11, 12, 13, 20, 99, 22, 5]))
    numbers = ([0, 4, 7], [0, 4, 7], [3, 2, 0])
    late = LateTokens(*(np.array(column, np.int32) for column in numbers))
    assert board.rejected(late).tolist() == [0, 1, 0]
    board.keep_drawn(torch.tensor([9, 11, 12]))  # the first is wrong, and so are those behind it
    assert board.rejected(late).tolist() == [3, 1, 0]


def test_ranks_and_other_backends_leave_their_guesses_to_the_host() -> None:
    executor = torch_executor("llama", is_captured=False)
    assert isinstance(executor, TorchExecutor)
    assert executor.settles_drafts
    assert not executor.share_tokens(tiny_engine("llama").executor, None, None)
    assert not tiny_engine("llama").executor.settles_drafts


@pytest.mark.usefixtures("free_guesses")
def test_nothing_between_two_steps_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, late, _ = drafting_engine("llama", 1)
    calls: list[str] = []

    def guarded(owner: Any, name: str) -> None:
        whole = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            calls.append(name)
            with monkeypatch.context() as patched:
                refuse_waits(patched)
                return whole(*args, **options)

        monkeypatch.setattr(owner, name, call)

    guarded(LateNumbers, "move")
    guarded(LateNumbers, "draws")
    for name in ("rejected", "keep_guesses", "keep_computed", "keep_drawn", "has_guesses"):
        guarded(TokenBoard, name)
    assert answers(engine, SPECS[:2]) == expected_answers("llama", SPECS[:2])
    assert late.num_late > 2
    assert {"move", "draws", "rejected", "keep_guesses"} <= set(calls)
