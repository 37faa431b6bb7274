"""A model's own head as a source of drafts: the answers without it, over chunks, choices, prefixes and preemptions."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from octavo.config import EngineConfig
from octavo.engine.load import load_engine
from octavo.engine.schedule import Schedule
from octavo.engine.speculation.head_drafter import HeadDrafter
from octavo.engine.speculation.policy import DraftPolicy
from octavo.errors import UsageError
from octavo.sampling_params import SamplingParams
from tests.support.answers import Answers
from tests.support.drafting import AnyPolicy
from tests.support.fake_executor import create_request
from tests.support.integrity import check_integrity
from tests.support.late_steps import on_late_device
from tests.support.text_models import TEXTS, save_byte_level_tokenizer, save_decoder
from tests.support.tiny_heads import HEADS, agreeing_head, tiny_head

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0, logprobs=1)
SEEDED = replace(GREEDY, temperature=0.7, seed=3, n=2, max_tokens=12)
PROMPTS = [TEXTS[0], TEXTS[4], TEXTS[0] + TEXTS[1]]
OPTIONS: dict[str, Any] = {"num_threads": 1, "max_model_len": 160, "max_num_seqs": 4, "pack_cache": False}


@pytest.fixture(autouse=True)
def free_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts and rows cost nothing: so many of them are made as there is room for."""
    monkeypatch.setattr(HeadDrafter, "pays", lambda *_: True)
    monkeypatch.setattr(HeadDrafter, "_cost", lambda *_: 0.0)
    monkeypatch.setattr(DraftPolicy, "lengths", AnyPolicy(1, least=5).lengths)


def answers(llm: LLM) -> list[Any]:
    return [output.outputs for each in (GREEDY, SEEDED, GREEDY) for output in llm.generate(PROMPTS, each)]


@pytest.mark.parametrize("agrees", [True, False], ids=["right", "random"])
@pytest.mark.parametrize("name", HEADS)
def test_the_answers_are_those_without_it(name: str, agrees: bool, tmp_path: Path) -> None:
    make = agreeing_head if agrees else tiny_head
    model = str(save_byte_level_tokenizer(make(name, max_position_embeddings=160).save(tmp_path / "model")))
    options = {**OPTIONS, "max_num_batched_tokens": 32}
    with LLM(model, speculation="off", **options) as llm:
        expected = answers(llm)
    with LLM(model, **options) as llm:
        assert [output.outputs for output in llm.generate(PROMPTS, GREEDY)] == expected[:3]
        if agrees:
            assert llm.metrics.num_accepted_draft_tokens_total["mtp"] == llm.metrics.num_draft_tokens_total["mtp"] > 20
        assert answers(llm) == expected
        assert llm.metrics.num_draft_tokens_total["mtp"] > 60
        assert llm.metrics.num_prefix_hits_total


def test_few_drafts(tmp_path: Path) -> None:
    model = str(save_byte_level_tokenizer(agreeing_head("glm4moe", max_position_embeddings=160).save(tmp_path / "m")))
    with LLM(model, speculation="off", **OPTIONS) as llm:
        expected = answers(llm)
    with LLM(model, speculative_config={"method": "mtp", "num_speculative_tokens": 2}, **OPTIONS) as llm:
        assert answers(llm) == expected
        assert set(llm.metrics.num_accepted_by_position_total) == {"0", "1"}


@pytest.mark.parametrize(
    "options", [{"backend": "torch:cpu", "num_threads": 0}, {"backend": "reference"}, {"kv_dtype": "int8"}], ids=str
)
def test_other_backends_and_caches(options: dict[str, Any], tmp_path: Path) -> None:
    """A head is used on a GPU if it is asked for."""
    model = str(save_byte_level_tokenizer(agreeing_head("qwen35", max_position_embeddings=160).save(tmp_path / "m")))
    options, found = {**OPTIONS, **options}, []
    for speculation in ({"method": "off"}, {"method": "mtp"}):
        with LLM(model, speculative_config=speculation, **options) as llm:
            outputs = [output for each in (GREEDY, SEEDED) for output in llm.generate(PROMPTS, each)]
            found.append([choice.token_ids for output in outputs for choice in output.outputs])
            right = llm.metrics.num_accepted_draft_tokens_total.get("mtp", 0)
    assert found[0] == found[1]
    assert right > 30


@pytest.mark.parametrize("agrees", [True, False], ids=["right", "random"])
def test_two_steps_in_flight_on_torch(agrees: bool, tmp_path: Path) -> None:
    """The head reads what the model's step leaves on the device, and the next step takes its guesses there."""
    make = agreeing_head if agrees else tiny_head
    model = str(save_byte_level_tokenizer(make("glm4moe", max_position_embeddings=160).save(tmp_path / "m")))
    options = {**OPTIONS, "backend": "torch:cpu", "num_threads": 0}
    with LLM(model, speculation="off", **options) as llm:
        expected = [[choice.token_ids for choice in choices] for choices in answers(llm)]
    with LLM(model, speculative_config={"method": "mtp", "prompt_lookup_min": 16}, **options) as llm:
        late, draft = on_late_device(llm._session.model().engine)
        llm.generate(PROMPTS, GREEDY)
        right, drafted = llm.metrics.num_accepted_draft_tokens_total["mtp"], llm.metrics.num_draft_tokens_total["mtp"]
        assert [[choice.token_ids for choice in choices] for choices in answers(llm)] == expected
    assert late.num_late > 8
    assert draft.num_late > late.num_late
    assert drafted > 20
    assert not agrees or right == drafted


@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
@pytest.mark.parametrize("name", ["glm4moe", pytest.param("qwen35", marks=pytest.mark.slow)])
def test_the_answers_of_ranks(name: str, ranks: dict[str, int], tmp_path: Path) -> None:
    """The first rank, which is of the last stage, has the whole head."""
    model = str(save_byte_level_tokenizer(agreeing_head(name, max_position_embeddings=160).save(tmp_path / "m")))
    options = {**OPTIONS, "max_num_batched_tokens": 32, **ranks}
    with LLM(model, speculation="off", **options) as llm:
        expected = answers(llm)
    with LLM(model, **options) as llm:
        assert answers(llm) == expected
        right, drafted = llm.metrics.num_accepted_draft_tokens_total, llm.metrics.num_draft_tokens_total
        assert right["mtp"] > 30
        assert drafted["mtp"] > 60


@pytest.mark.parametrize("name", ["glm4moe", "qwen35"])
def test_preemptions_and_aborts(name: str, tmp_path: Path) -> None:
    model = str(save_byte_level_tokenizer(agreeing_head(name, max_position_embeddings=160).save(tmp_path / "m")))
    prompts = [[5 + (7 * i + j) % 40 for j in range(20 + i)] for i in range(4)]
    found = []
    for speculation in ("off", "auto"):
        loaded = load_engine(EngineConfig(model=model, speculation=speculation, **OPTIONS))
        engine, outputs = loaded.engine, Answers()
        for i, prompt in enumerate(prompts):
            engine.add_request(create_request(engine, str(i), prompt, replace(GREEDY, n=1 + i % 2, seed=i)))
        for at in itertools.count():
            if not engine.has_work:
                break
            outputs.take(engine.step())
            if at in (2, 4):
                engine.admission.preempt(engine.admission.queue.running[-1], Schedule(0, 0, 0))
            if at == 3:
                engine.abort("0")
            check_integrity(engine.scheduler)
        assert engine.metrics.num_preemptions_total == 2
        found.append([[choice.token_ids for choice in outputs[str(i)].outputs] for i in range(1, 4)])
        right = engine.metrics.num_accepted_draft_tokens_total.get("mtp", 0)
        assert (right > 20) == (speculation == "auto")
        loaded.executor.close()
        if loaded.draft_executor is not None:
            loaded.draft_executor.close()
    assert found[0] == found[1]


def test_the_engine_goes_on_without_a_head_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(save_byte_level_tokenizer(agreeing_head("glm4moe", max_position_embeddings=160).save(tmp_path / "m")))
    with LLM(model, speculation="off", **OPTIONS) as llm:
        expected = answers(llm)
    run, steps = HeadDrafter._run, iter(range(1000))

    def fails(self: HeadDrafter, *rest: Any) -> Any:
        if next(steps) == 4:
            raise RuntimeError("made up")
        return run(self, *rest)

    monkeypatch.setattr(HeadDrafter, "_run", fails)
    with LLM(model, **OPTIONS) as llm:
        assert answers(llm) == expected
        assert llm.metrics.num_lost_draft_models == 1
        assert next(steps) == 5


def test_heads_that_are_other_models_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="method is 'medusa'; it must be auto, off, ngram, draft_model, mtp, eagle3"):
        LLM(str(save_decoder(tmp_path)), speculative_config={"method": "medusa", "model": "head"}, **OPTIONS)


def test_a_model_without_a_head_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="method mtp: the model has no prediction head"):
        LLM(str(save_decoder(tmp_path)), speculative_config={"method": "deepseek_mtp"}, **OPTIONS)
