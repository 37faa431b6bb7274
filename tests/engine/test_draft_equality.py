"""Answers with drafts, right, wrong and against a grammar, are those without, bit for bit, in every kind of engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from octavo import LLM, SamplingParams, StructuredOutputsParams
from octavo.engine.request import Sequence
from octavo.outputs import RequestOutput
from octavo.server.tool_parsers.tool_format import tool_formats
from tests.support.drafting import AnyPolicy, ScriptedGuesser, ScriptedSource, with_drafts
from tests.support.text_models import save_decoder, save_hybrid
from tests.support.tool_outputs import TOOLS

BASE = SamplingParams(temperature=0.7, seed=4, max_tokens=24, ignore_eos=True, logprobs=2)
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "fox"]}, "b": {"type": "boolean"}}, "required": ["a"]}
KINDS: dict[str, SamplingParams] = {
    "greedy": replace(BASE, temperature=0.0),
    "seeded": replace(BASE, top_p=0.9, top_k=40, min_p=0.01),
    "penalties": replace(BASE, frequency_penalty=1.0, presence_penalty=0.5, repetition_penalty=1.2),
    "bias": replace(BASE, logit_bias={70: 5.0, 90: -3.0}),
    "bad words": replace(BASE, bad_words=["a", "the"], temperature=0.0),
    "min tokens": replace(BASE, ignore_eos=False, min_tokens=12, logit_bias={3: 4.0}),
    "JSON schema": replace(BASE, structured_outputs=StructuredOutputsParams(json=SCHEMA)),
    "tools": replace(
        BASE, structured_outputs=StructuredOutputsParams(grammar=tool_formats()["hermes"].grammar(TOOLS, True, {}))
    ),
    "stop strings": replace(BASE, stop=["o", "d", "\n"]),
    "n": replace(BASE, n=3),
    "log-probabilities": replace(BASE, prompt_logprobs=1, processed_logprobs=True),
}
# The seed is the name of a kind in the script.
KINDS = {name: replace(params, seed=100 + i) for i, (name, params) in enumerate(KINDS.items())}
PROMPTS = ["the quick brown fox jumps over the lazy dog and the quick ", "the quick brown fox jumps over a dog"]
ROOM: dict[str, Any] = {"num_threads": 1, "max_model_len": 160, "max_num_seqs": 12, "kv_cache_memory": 2 << 20}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 6},
    "preemption": {"kv_cache_memory": 56 << 10},
    "int8 cache": {"kv_dtype": "int8"},
    "tensor ranks": {"tensor_parallel_size": 2},
    "pipeline ranks": {"pipeline_parallel_size": 2},
    "torch": {"backend": "torch:cpu"},
    "hybrids": {"kv_cache_memory": 8 << 20, "speculation": "auto"},  # which has slots for the states before drafts
}
# Its log-probabilities may differ in the last bit with the rows of a step, whatever these are.
NEARLY_EQUAL = ("torch",)
FORBIDDEN = 1  # [PAD], in no text and no grammar
DRAFTS: dict[str, tuple[Callable[[int], bool], int]] = {
    "right": (lambda _: True, 0),
    "wrong": (lambda position: position % 3 != 1, 9),
    "against grammars": (lambda position: position % 4 != 2, FORBIDDEN),
}


class Script(ScriptedSource):
    """Guesses the answers to the prompts of this file, by prompt and seed."""

    def open(self, sequence: Sequence) -> ScriptedGuesser | None:
        request = sequence.request
        choices = self.expected.get(script_key(request.prompt.token_ids, request.params.sampling.seed))
        return None if choices is None else ScriptedGuesser(self, sequence, choices[sequence.index])


def script_key(token_ids: Any, seed: int | None) -> str:
    return f"{seed} {list(token_ids)}"


@dataclass
class Case:
    """An engine, and the answers that it gave without drafts. script: see `Script`."""

    llm: LLM
    name: str
    expected: list[Any]
    script: dict[str, list[list[int]]]


def answers(llm: LLM) -> list[RequestOutput]:
    """All kinds of requests at once, and then some again, whose prompts are in the cache."""
    params = [each for each in KINDS.values() for _ in PROMPTS]
    found = llm.generate(PROMPTS * len(KINDS), params)
    return found + llm.generate(PROMPTS, [KINDS["greedy"], KINDS["seeded"]])


def shown(outputs: list[RequestOutput], *, has_same_bits: bool) -> list[Any]:
    if not has_same_bits:
        return [[choice.token_ids for choice in output.outputs] for output in outputs]
    return [(output.outputs, output.prompt_logprobs) for output in outputs]


@pytest.fixture(scope="module", params=ENGINES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    save = save_hybrid if request.param == "hybrids" else save_decoder
    model = str(save(tmp_path_factory.mktemp("model")))
    with LLM(model, **{"speculation": "off", **ROOM, **ENGINES[request.param]}) as llm:
        llm._session.model().engine.speculation = None
        outputs = answers(llm)
        if request.param != "preemption":  # which evicts prompts
            assert outputs[-1].num_cached_tokens
        seeds = [params.seed for params in KINDS.values() for _ in PROMPTS]
        script = {
            script_key(output.prompt_token_ids, seed): [list(choice.token_ids) for choice in output.outputs]
            for output, seed in zip(outputs, seeds, strict=False)
        }
        yield Case(llm, request.param, shown(outputs, has_same_bits=request.param not in NEARLY_EQUAL), script)


@pytest.mark.parametrize("drafts", DRAFTS)
def test_answers_are_those_without_drafts(case: Case, drafts: str) -> None:
    is_right, wrong = DRAFTS[drafts]
    metrics = case.llm.metrics
    before = metrics.num_draft_tokens_total.get("script", 0), metrics.num_accepted_draft_tokens_total.get("script", 0)
    preempted = metrics.num_preemptions_total
    with_drafts(case.llm._session.model().engine, Script(case.script, is_right, wrong), AnyPolicy(3, least=1))
    assert shown(answers(case.llm), has_same_bits=case.name not in NEARLY_EQUAL) == case.expected
    drafted = metrics.num_draft_tokens_total["script"] - before[0]
    right = metrics.num_accepted_draft_tokens_total["script"] - before[1]
    assert right > 50
    if drafts != "right":
        assert drafted > right
    assert case.name != "preemption" or metrics.num_preemptions_total > preempted
