"""A draft model beside its target: the answers without it, from a cache with the target's blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM
from octavo.backends import Executor
from octavo.batch import Batch, StepOutput
from octavo.engine import load
from octavo.engine.engine import Engine
from octavo.engine.loading import draft_model
from octavo.engine.loading.draft_model import check_vocabulary
from octavo.engine.speculation.model_drafter import ModelDrafter
from octavo.engine.speculation.policy import DraftPolicy
from octavo.errors import EngineDeadError, InsufficientMemoryError, UsageError
from octavo.outputs import OutputDelta
from octavo.sampling_params import SamplingParams
from tests.support.answers import Answers
from tests.support.drafting import AnyPolicy
from tests.support.fake_executor import FakeExecutor, FakeTokenizer, create_request, fake_engine
from tests.support.integrity import check_integrity
from tests.support.text_models import save_decoder, save_hybrid
from tests.support.tiny_gguf import tiny_gguf

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0, logprobs=1)
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]
ENGINES: dict[str, dict[str, Any]] = {
    "roomy": {"num_blocks": 256},
    "chunks": {"num_blocks": 256, "max_num_batched_tokens": 8, "max_num_seqs": 4},
    "preemption": {"num_blocks": 22},
}

PAYS = ModelDrafter.pays


@pytest.fixture(autouse=True)
def free_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts and rows cost nothing: so many of them are made as there is room for."""
    monkeypatch.setattr(ModelDrafter, "pays", lambda *_: True)
    monkeypatch.setattr(ModelDrafter, "_cost", lambda *_: 0.0)
    monkeypatch.setattr(DraftPolicy, "lengths", AnyPolicy(1, least=5).lengths)


def drafting_engine(draft: FakeExecutor, **options: Any) -> Engine:
    engine = fake_engine(**options)
    engine.speculate([])
    engine.draft_with(draft)
    return engine


def answers(engine: Engine, params: SamplingParams, count: int = 3) -> dict[str, Any]:
    found = Answers()
    for i in range(count):
        engine.add_request(create_request(engine, str(i), [*PROMPT, *PROMPT, 20 + i], replace(params, seed=i)))
        for _ in range(4):
            found.take(engine.step())
    while engine.has_work:
        found.take(engine.step())
        check_integrity(engine.scheduler)
    assert all(isinstance(each, OutputDelta) for each in found.values())
    return {name: each.outputs for name, each in found.items() if isinstance(each, OutputDelta)}


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("params", [GREEDY, replace(GREEDY, temperature=0.7, n=2)], ids=["greedy", "sampled"])
def test_the_answers_are_those_without_it(name: str, params: SamplingParams) -> None:
    engine = drafting_engine(FakeExecutor(), **ENGINES[name])
    assert answers(engine, params) == answers(fake_engine(num_blocks=256), params)
    drafted, right = (
        counts["draft_model"]
        for counts in (engine.metrics.num_draft_tokens_total, engine.metrics.num_accepted_draft_tokens_total)
    )
    assert right > 40
    if params is GREEDY and name != "preemption":  # it is the same model: all it sees must be right
        assert right == drafted
    assert name != "preemption" or engine.metrics.num_preemptions_total


def test_a_prompt_is_read_after_the_first_token_and_only_what_no_block_has() -> None:
    draft = FakeExecutor()
    engine = drafting_engine(draft, num_blocks=256, max_num_batched_tokens=64)
    prompt = [5 + i % 40 for i in range(40)]
    request = create_request(engine, "first", prompt, replace(GREEDY, max_tokens=12))
    engine.add_request(request)
    engine.step()
    assert request.num_generated_tokens == 1
    assert draft.num_tokens == 0
    engine.abort("first")
    engine.add_request(create_request(engine, "second", prompt, replace(GREEDY, max_tokens=12)))
    while engine.has_work:
        engine.step()
    before = draft.num_tokens
    engine.add_request(create_request(engine, "third", prompt, replace(GREEDY, max_tokens=12)))
    engine.step()
    assert draft.num_tokens == before
    while engine.has_work:
        engine.step()
    assert draft.num_tokens - before < 36  # of its prompt, 9 blocks are there


def test_a_draft_model_that_does_not_pay_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while every step is prepared beside the one before, so that drafts are only asked for on a hint."""
    monkeypatch.setattr(ModelDrafter, "pays", PAYS)
    monkeypatch.setattr(ModelDrafter, "_cost", lambda *_: 2.0)
    monkeypatch.setattr(ModelDrafter, "_is_worth_reading", lambda *_: True)  # else by measured times
    draft = FakeExecutor()
    engine = drafting_engine(draft, num_blocks=256, max_model_len=400)
    engine.add_request(create_request(engine, "r", PROMPT, replace(GREEDY, max_tokens=300)))
    while engine.has_work:
        engine.start()
        engine.publish()
        engine.prepare()
        engine.finish()
    assert draft.num_steps == 4  # one for each 64 of 300


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("killed"),
        MemoryError(),
        torch.OutOfMemoryError("no memory on the device"),
        InsufficientMemoryError("no memory"),
        EngineDeadError("a rank has ended"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_engine_goes_on_without_a_draft_model_that_fails(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(FakeExecutor):
        def compute(self, batch: Batch) -> StepOutput:
            if self.num_steps == 4:
                raise error
            return super().compute(batch)

    draft = Failing()
    engine = drafting_engine(draft, num_blocks=256)
    assert answers(engine, GREEDY) == answers(fake_engine(num_blocks=256), GREEDY)
    assert draft.num_steps == 4
    assert engine.speculation is not None
    assert engine.speculation.drafter is None
    assert engine.speculation.source_names == ()
    assert engine.metrics.num_lost_draft_models == 1
    assert f"the draft model is no longer used: {error}" in caplog.text


def test_a_start_that_has_no_memory_for_the_draft_model_says_so_and_frees_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Executor] = []
    compile_target = load._executor

    def watched(*arguments: Any) -> tuple[Executor, object]:
        executor, kept = compile_target(*arguments)
        close = executor.close
        monkeypatch.setattr(executor, "close", lambda: (closed.append(executor), close()))
        return executor, kept

    def no_memory(*_: Any, **__: Any) -> Executor:
        raise InsufficientMemoryError("the draft model needs 1 GiB")

    monkeypatch.setattr(load, "_executor", watched)
    monkeypatch.setattr(draft_model, "compile_graph", no_memory)
    model = str(save_decoder(tmp_path / "decoder"))
    with pytest.raises(InsufficientMemoryError, match="draft model needs 1 GiB"):
        LLM(model, draft_model=model, num_threads=1, max_model_len=64)
    assert len(closed) == 1


@pytest.mark.parametrize("is_deferred", [False, True], ids=["at once", "late"])
def test_two_steps_in_flight(is_deferred: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts wait for the first of them; while they do not pay, the second is in flight."""
    draft = FakeExecutor()
    engine = drafting_engine(draft, num_blocks=256)
    executor = engine.executor
    assert isinstance(executor, FakeExecutor)
    executor.max_in_flight, executor.is_deferred = 2, is_deferred
    monkeypatch.setattr(ModelDrafter, "pays", lambda *_: engine.metrics.num_steps_total % 12 < 6)
    found, most = Answers(), 0
    for i in range(3):
        params = replace(GREEDY, seed=i)
        engine.add_request(create_request(engine, str(i), [*PROMPT, *PROMPT, 20 + i], params))
    while engine.has_work:
        engine.start()
        found.take(engine.publish())
        engine.prepare()
        most = max(most, executor.num_in_flight)
        engine.finish()
    assert most == 2
    assert {name: each.outputs for name, each in found.items() if isinstance(each, OutputDelta)} == answers(
        fake_engine(num_blocks=256), GREEDY
    )
    assert engine.metrics.num_accepted_draft_tokens_total["draft_model"] > 10


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_dtype": "int8"},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"backend": "torch:cpu"},
        pytest.param({"backend": "torch:cpu", "tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_real_kernels(tmp_path: Path, options: dict[str, Any]) -> None:
    model = str(save_decoder(tmp_path / "decoder"))
    prompts = ["the quick brown fox jumps over the lazy dog", "a dog"]
    options = {**options, "num_threads": 1, "max_model_len": 160, "kv_cache_memory": 1 << 20}
    params = [replace(GREEDY, max_tokens=40), replace(GREEDY, max_tokens=24, temperature=0.6, seed=2, n=2)]

    def shown(llm: LLM) -> list[Any]:
        choices = [choice for each in params for output in llm.generate(prompts, each) for choice in output.outputs]
        return choices if "backend" not in options else [choice.token_ids for choice in choices]  # torch: near ties

    with LLM(model, speculation="off", **options) as llm:
        expected = shown(llm)
    with LLM(model, draft_model=model, **options) as llm:
        assert shown(llm) == expected
        assert llm.metrics.num_accepted_draft_tokens_total["draft_model"] > 30
    config = {"model": model, "num_speculative_tokens": 2}
    with LLM(model, speculative_config=config, **options) as llm:
        assert shown(llm) == expected
        assert set(llm.metrics.num_accepted_by_position_total) == {"0", "1"}


def test_another_vocabulary_is_refused_with_the_first_token_that_differs() -> None:
    class Other(FakeTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            return b"other" if token_id == 17 else super().token_bytes(token_id)

    check_vocabulary(FakeTokenizer(), FakeTokenizer(), "draft")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"token 17 is b'other' there and b'M' in the model"):
        check_vocabulary(FakeTokenizer(), Other(), "draft")  # type: ignore[arg-type]


def test_a_draft_model_is_refused_before_its_target_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = str(save_decoder(tmp_path / "decoder")), tmp_path / "other.gguf"
    other.write_bytes(tiny_gguf())
    monkeypatch.setattr(load, "_executor", lambda *_: pytest.fail("the target was loaded"))
    with pytest.raises(UsageError, match=r"a different vocabulary: token \d+ is b'.*' there and b'.*' in the model"):
        LLM(model, draft_model=str(other), num_threads=1)
    hybrid = str(save_hybrid(tmp_path / "hybrid"))
    with pytest.raises(UsageError, match="must be a decoder without states"):
        LLM(hybrid, draft_model=hybrid, num_threads=1)
