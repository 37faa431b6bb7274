"""N-gram drafts on real kernels: the tokens and log-probabilities of answers without them, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from octavo import LLM, SamplingParams, StructuredOutputsParams
from octavo.engine.speculation.ngram import NgramSource
from octavo.engine.speculation.policy import DraftPolicy
from octavo.engine.speculation.token_index import Match, TokenIndex
from octavo.outputs import RequestOutput
from octavo.prompt import Prompt
from tests.support.drafting import AnyPolicy
from tests.support.text_models import save_decoder

OPTIONS: dict[str, Any] = {"num_threads": 1, "max_model_len": 200, "max_num_seqs": 6, "kv_cache_memory": 1 << 20}
GREEDY = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True, logprobs=2)
KINDS = [
    GREEDY,
    replace(GREEDY, temperature=0.8, seed=3, n=3),
    replace(GREEDY, frequency_penalty=0.2, repetition_penalty=1.05, logit_bias={11: 1.0}),
    replace(GREEDY, structured_outputs=StructuredOutputsParams(regex="(the |fox |dog )+")),
]
PROMPT = "the quick brown fox jumps over the lazy dog and the quick brown fox sleeps "
PROMPTS = [PROMPT, PROMPT * 3, "a dog"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_decoder(tmp_path_factory.mktemp("decoder")))


def answers(llm: LLM) -> list[Any]:
    found = []
    for params in KINDS:
        outputs: list[RequestOutput] = llm.generate(PROMPTS, params)
        found += [
            (choice.token_ids, choice.cumulative_logprob, choice.logprobs)
            for output in outputs
            for choice in output.outputs
        ]
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_dtype": "int8"},
        {"max_num_batched_tokens": 16, "num_threads": 2},
        {"kv_cache_memory": 56 << 10},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_answers_are_those_without_drafts(model: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(model, speculation="off", **{**OPTIONS, **options}) as llm:
        expected = answers(llm)
        assert llm.metrics.num_drafts_total == 0
        assert "kv_cache_memory" not in options or llm.metrics.num_preemptions_total
    monkeypatch.setattr(DraftPolicy, "lengths", AnyPolicy(1, least=1).lengths)
    with LLM(model, **{**OPTIONS, **options}) as llm:  # n-grams are on by themselves
        assert answers(llm) == expected
        assert llm.metrics.num_accepted_draft_tokens_total["ngram"] > 100
        assert llm.metrics.num_draft_tokens_total["ngram"] > llm.metrics.num_accepted_draft_tokens_total["ngram"]


def test_torch_takes_drafts_if_asked(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**OPTIONS, "backend": "torch:cpu"}
    with LLM(model, **options) as llm:
        expected = [tokens for tokens, *_ in answers(llm)]
        assert llm.metrics.num_drafts_total == 0
    monkeypatch.setattr(DraftPolicy, "lengths", AnyPolicy(1, least=1).lengths)
    with LLM(model, speculative_config={"method": "ngram", "num_speculative_tokens": 3}, **options) as llm:
        assert [tokens for tokens, *_ in answers(llm)] == expected
        assert llm.metrics.num_accepted_draft_tokens_total["ngram"] > 100
        assert set(llm.metrics.num_accepted_by_position_total) == {"0", "1", "2"}


# --- the index ---


def test_the_longest_match_is_found_and_the_latest_of_equals() -> None:
    tokens = [1, 2, 3, 4, 9, 2, 3, 5, 9, 2, 3, 6]
    index = TokenIndex(tokens)
    index.extend()
    assert index.find([7, 2, 3]) == Match(11, 2)
    assert index.find([9, 2, 3]) == Match(11, 3)
    assert index.find([1, 2, 3]) == Match(3, 3)
    assert index.find([3, 6]) is None  # nothing follows its only place
    assert index.find([3]) is None
    tokens += [7, 3, 6]
    index.extend()
    assert index.find([3, 6]) == Match(12, 2)


def _text(token_ids: list[int]) -> Any:
    """A sequence with these tokens and no images."""
    return SimpleNamespace(token_ids=token_ids, request=SimpleNamespace(prompt=Prompt(token_ids)))


def test_a_text_that_repeats_itself_goes_on_repeating() -> None:
    text = _text([5, 1, 2, 3, 1, 2, 3])

    guesser = NgramSource().open(text)
    draft = guesser.guess((), 7)
    assert draft is not None
    assert (draft.token_ids, draft.levels) == ([1, 2, 3, 1, 2, 3, 1], [3, 4, 5, 6, 7, 8, 9])
    after = guesser.guess((1,), 4)
    assert after is not None
    assert (after.token_ids, after.levels[0]) == ([2, 3, 1, 2], 4)
    assert guesser.guess((8,), 4) is None


def test_options_of_ngrams_limit_what_counts_as_a_match() -> None:
    text = _text([1, 2, 3, 4, 1, 2, 3])

    draft = NgramSource(max_match=2).open(text).guess((), 3)
    assert draft is not None
    assert draft.levels == [2, 2, 2]
    assert NgramSource(min_match=4).open(text).guess((), 3) is None
