"""Acceptance of drafts, judged by teacher forcing and by transformers' own speculation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from octavo import LLM, SamplingParams
from octavo.engine.speculation.model_drafter import ModelDrafter
from octavo.engine.speculation.policy import DraftPolicy
from tests.support.text_models import save_decoder

NUM_TOKENS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
OPTIONS: dict[str, Any] = {"num_threads": 1, "max_model_len": 160, "kv_cache_memory": 1 << 20}
PROMPT = "the fox jumps"
NUM_TOKEN_IDS = 292  # of the tokenizer


@pytest.fixture(autouse=True)
def free_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts and rows cost nothing: as many are computed as there are."""
    monkeypatch.setattr(ModelDrafter, "pays", lambda *_: True)
    monkeypatch.setattr(ModelDrafter, "_cost", lambda *_: 0.0)
    monkeypatch.setattr(DraftPolicy, "lengths", lambda _, chains, *__, **___: [len(chain) for chain in chains])


@dataclass
class Pair:
    """A target, a draft model that often agrees with it, and the target's greedy answer."""

    target: str
    draft: str
    prompt_ids: list[int]
    answer: list[int]

    def load(self, path: str) -> PreTrainedModel:
        """A model of the pair in transformers, in float32."""
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        model.generation_config.eos_token_id = None
        return model


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    target, draft = save_decoder(folder / "target"), save_decoder(folder / "draft")
    _change(target, noise=0.0)
    _change(draft, noise=0.12)
    with LLM(str(target), speculation="off", **OPTIONS) as llm:
        (output,) = llm.generate(PROMPT, GREEDY)
        yield Pair(str(target), str(draft), output.prompt_token_ids, output.outputs[0].token_ids)


def _change(folder: Path, *, noise: float) -> None:
    """Adds noise to a model's weights, as a share of their deviation; rows beyond the vocabulary become zeros."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * parameter.std() * torch.randn_like(parameter)
        model.get_input_embeddings().weight[NUM_TOKEN_IDS:] = 0.0
    model.save_pretrained(folder)


def drafts_of(is_right: list[bool], most: int) -> tuple[int, int]:
    """The drafts, and the right ones, of an answer at whose positions a guess is right or not, `most` in a step."""
    drafted, right, position = 0, 0, 1
    while position < NUM_TOKENS:
        count = min(most, NUM_TOKENS - position - 1)
        run = next((i for i in range(count) if not is_right[position + i]), count)
        drafted, right, position = drafted + count, right + run, position + run + 1
    return drafted, right


@pytest.mark.parametrize("most", [1, 3, 15])
def test_acceptance_is_the_teacher_forced_rate_of_rank_one(pair: Pair, most: int) -> None:
    with LLM(pair.draft, speculation="off", **OPTIONS) as llm:
        whole = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        (output,) = llm.generate({"prompt_token_ids": pair.prompt_ids + pair.answer}, whole)
    assert output.prompt_logprobs is not None
    entries = output.prompt_logprobs[len(pair.prompt_ids) :]
    is_right = [entry is not None and entry[token].rank == 1 for entry, token in zip(entries, pair.answer, strict=True)]
    assert 0.3 < sum(is_right) / NUM_TOKENS < 0.97  # so that it says something
    config = {"model": pair.draft, "num_speculative_tokens": most, "prompt_lookup_min": 16}
    with LLM(pair.target, speculative_config=config, **OPTIONS) as llm:
        assert llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == pair.answer
        metrics = llm.metrics
        found = (
            metrics.num_draft_tokens_total["draft_model"],
            metrics.num_accepted_draft_tokens_total["draft_model"],
        )
        assert set(metrics.num_draft_tokens_total) == {"draft_model"}
    assert found == drafts_of(is_right, most)
    if most == 1:  # every position but those behind a right guess has one
        assert found[1] / found[0] == pytest.approx(sum(is_right) / NUM_TOKENS, abs=0.15)


class CountedForwards:
    """The tokens that a model of transformers is given in each call."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.rows: list[int] = []
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _: object, __: object, values: dict[str, Any]) -> None:
        self.rows.append(values["input_ids"].shape[1])


def test_transformers_assistant_gives_the_same_tokens_with_the_same_steps(pair: Pair) -> None:
    target, draft = pair.load(pair.target), pair.load(pair.draft)
    draft.generation_config.num_assistant_tokens = 3
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    counted = CountedForwards(target)
    ids = torch.tensor([pair.prompt_ids])
    out = target.generate(ids, assistant_model=draft, max_new_tokens=NUM_TOKENS, do_sample=False)
    assert out[0, ids.shape[1] :].tolist() == pair.answer
    config = {"model": pair.draft, "num_speculative_tokens": 3, "prompt_lookup_min": 16}
    with LLM(pair.target, speculative_config=config, **OPTIONS) as llm:
        assert llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == pair.answer
        num_steps = llm.metrics.num_steps_total
    # There, the first step has drafts behind the prompt, which here are not waited for.
    assert num_steps == pytest.approx(len(counted.rows), abs=2)


def test_transformers_prompt_lookup_gives_the_same_tokens_in_about_as_many_steps(pair: Pair) -> None:
    """Its rule differs: the first place of up to three tokens, where ours takes the longest and latest match."""
    target = pair.load(pair.target)
    counted = CountedForwards(target)
    prompt = pair.prompt_ids + pair.answer  # so that the answer is in it
    with LLM(pair.target, speculation="off", **OPTIONS) as llm:
        expected = llm.generate({"prompt_token_ids": prompt}, GREEDY)[0].outputs[0].token_ids
    out = target.generate(
        torch.tensor([prompt]),
        prompt_lookup_num_tokens=5,
        max_matching_ngram_size=3,
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
    )
    assert out[0, len(prompt) :].tolist() == expected
    config = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2}
    with LLM(pair.target, speculative_config=config, **OPTIONS) as llm:
        assert llm.generate({"prompt_token_ids": prompt}, GREEDY)[0].outputs[0].token_ids == expected
        num_steps = llm.metrics.num_steps_total
    assert num_steps < 0.9 * NUM_TOKENS
    assert num_steps == pytest.approx(len(counted.rows), rel=0.35)
