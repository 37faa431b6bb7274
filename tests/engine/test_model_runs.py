"""The engine over tiny models on the reference backend: the answer is the model's, whatever the batch."""

from __future__ import annotations

import pytest
import torch

from octavo.backends import ExecutorLimits, reference
from octavo.backends.cpu.passes import PASSES
from octavo.engine.engine import Engine, EngineLimits
from octavo.graph.passes import optimize
from octavo.outputs import RequestOutput
from octavo.sampling_params import RequestOutputKind, SamplingParams
from tests.support.fake_executor import FakeTokenizer, create_request
from tests.support.tiny_models import tiny_graph, tiny_model

VOCAB_SIZE = 96
PROMPTS = [[1, 5, 9], [1, 5, 9, 30, 31, 70, 11, 12, 13], [4], [90, 91, 92, 93, 94], [7] * 20]


class Tokenizer(FakeTokenizer):
    vocab_size = VOCAB_SIZE
    eos_token_ids: frozenset[int] = frozenset()


def tiny_engine(name: str, *, num_blocks: int = 64, max_num_batched_tokens: int = 64, max_num_seqs: int = 8) -> Engine:
    graph, weights = tiny_graph(name)
    limits = ExecutorLimits(max_num_batched_tokens, max_num_seqs, max_num_seqs + 4, 64)
    executor = reference.compile(optimize(graph, PASSES), weights, limits, dtype="float64")
    executor.allocate_cache(num_blocks, 4)
    return Engine(
        executor,
        Tokenizer(),
        EngineLimits(64, max_num_seqs, max_num_batched_tokens, max_num_seqs + 4, 4, num_blocks, VOCAB_SIZE),
    )


def answers(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[list[list[int]]]:
    """Token ids of each choice of each prompt, all handed in at once."""
    for i, prompt in enumerate(prompts):
        engine.add_request(create_request(engine, str(i), prompt, params))
    found: dict[str, RequestOutput] = {}
    while engine.has_work:
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            found[output.request_id] = output
        engine.scheduler.check_integrity()
    return [[choice.token_ids for choice in found[str(i)].outputs] for i in range(len(prompts))]


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3"])
def test_greedy_answers_are_those_of_transformers(name: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, output_kind=RequestOutputKind.FINAL_ONLY)
    found = answers(tiny_engine(name), PROMPTS, params)
    model = tiny_model(name).double()
    model.generation_config.eos_token_id = None
    for prompt, (answer,) in zip(PROMPTS, found, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert answer == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_do_not_depend_on_batch_chunks_or_room(temperature: float) -> None:
    params = SamplingParams(
        n=2, seed=9, temperature=temperature, max_tokens=10, output_kind=RequestOutputKind.FINAL_ONLY
    )
    alone = [answers(tiny_engine("llama"), [prompt], params)[0] for prompt in PROMPTS]
    assert answers(tiny_engine("llama"), PROMPTS, params) == alone
    assert answers(tiny_engine("llama", max_num_batched_tokens=8), PROMPTS, params) == alone
    cramped = tiny_engine("llama", num_blocks=16, max_num_batched_tokens=8, max_num_seqs=6)
    assert answers(cramped, PROMPTS[::-1], params) == alone[::-1]
    assert cramped.scheduler.num_preemptions > 0
