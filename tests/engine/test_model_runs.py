"""The engine over tiny models, in numpy and on torch: the answer is the model's, whatever the batch."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

import pytest
import torch

from octavo.backends import Executor, ExecutorLimits, get_backend, reference
from octavo.backends.cpu.lowering import PASSES
from octavo.backends.torch.compile import TorchBackend
from octavo.engine.engine import Engine
from octavo.engine.limits import EngineLimits
from octavo.graph.builder import Graph
from octavo.graph.passes import optimize
from octavo.quantization.packed import Weight
from octavo.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from tests.support import tiny_classic
from tests.support.answers import Answers, answers_of
from tests.support.fake_executor import FakeTokenizer, create_request
from tests.support.integrity import check_integrity
from tests.support.tiny_hybrids import HYBRIDS
from tests.support.tiny_models import tiny_graph, tiny_model

VOCAB_SIZE = 96
PROMPTS = [[1, 5, 9], [1, 5, 9, 30, 31, 70, 11, 12, 13], [4], [90, 91, 92, 93, 94], [7] * 20]


class Tokenizer(FakeTokenizer):
    vocab_size = VOCAB_SIZE
    eos_token_ids: frozenset[int] = frozenset()


def exact_executor(backend: str, graph: Graph, weights: Mapping[str, Weight], limits: ExecutorLimits) -> Executor:
    """On `reference` or `torch`, in float64 and with a cache that does not round; or on `cpu`, as it is."""
    if backend == "cpu":
        return get_backend("cpu").compile(graph, weights, limits, num_threads=2)
    if backend == "reference":
        return reference.compile(optimize(graph, PASSES), weights, limits, dtype="float64")
    return TorchBackend(torch.device("cpu"), torch.float64, torch.float64).compile(graph, weights, limits)


def with_torch(names: Iterable[str], quick: Container[str]) -> list[object]:
    """(name, backend) for parametrize. quick: the names whose runs on torch are not marked slow."""
    names = list(names)
    marks = {name: () if name in quick else pytest.mark.slow for name in names}
    return [(n, "reference") for n in names] + [pytest.param(n, "torch", marks=marks[n]) for n in names]


def tiny_engine(
    name: str,
    backend: str = "reference",
    *,
    num_blocks: int = 64,
    max_num_batched_tokens: int = 64,
    max_num_seqs: int = 8,
) -> Engine:
    graph, weights = tiny_graph(name)
    limits = ExecutorLimits(max_num_batched_tokens, max_num_seqs, max_num_seqs + 4, 64)
    executor = exact_executor(backend, graph, weights, limits)
    block_size = 8 if backend == "cpu" else 4
    executor.allocate_cache(num_blocks, block_size, 2 * max_num_seqs)
    num_states = 2 * max_num_seqs if executor.cache_sizes.state_bytes else 0
    rows = max_num_seqs + 4
    engine_limits = EngineLimits(
        64, max_num_seqs, max_num_batched_tokens, rows, block_size, num_blocks, VOCAB_SIZE, num_states=num_states
    )
    return Engine(executor, Tokenizer(), engine_limits)


def answers(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[list[list[int]]]:
    """Token ids of each choice of each prompt, all handed in at once."""
    for i, prompt in enumerate(prompts):
        engine.add_request(create_request(engine, str(i), prompt, params))
    found = Answers()
    while engine.has_work:
        found.take(engine.step())
        check_integrity(engine.scheduler)
    return [[choice.token_ids for choice in found[str(i)].outputs] for i in range(len(prompts))]


ARCHITECTURES = ["llama", "mistral-window", "gemma3", "llama4-short", "mamba2", *tiny_classic.CONFIGS, *HYBRIDS]


@pytest.mark.parametrize(("name", "backend"), with_torch(ARCHITECTURES, ("llama", "gemma3")))
def test_greedy_answers_are_those_of_transformers(name: str, backend: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, output_kind=RequestOutputKind.FINAL_ONLY)
    found = answers(tiny_engine(name, backend), PROMPTS, params)
    model = tiny_model(name).double()
    model.generation_config.eos_token_id = None
    for prompt, (answer,) in zip(PROMPTS, found, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert answer == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("name", "backend"), with_torch(["llama", *HYBRIDS], ("llama", "lfm2")))
def test_answers_do_not_depend_on_batch_chunks_or_room(name: str, backend: str, temperature: float) -> None:
    params = SamplingParams(
        n=2, seed=9, temperature=temperature, max_tokens=10, output_kind=RequestOutputKind.FINAL_ONLY
    )
    alone = [answers(tiny_engine(name, backend), [prompt], params)[0] for prompt in PROMPTS]
    assert answers(tiny_engine(name, backend), PROMPTS, params) == alone
    assert answers(tiny_engine(name, backend, max_num_batched_tokens=8), PROMPTS, params) == alone
    cramped = tiny_engine(name, backend, num_blocks=16, max_num_batched_tokens=8, max_num_seqs=6)
    assert answers(cramped, PROMPTS[::-1], params) == alone[::-1]
    assert cramped.metrics.num_preemptions_total > 0


@pytest.mark.parametrize("name", ["mixtral", "deepseek3", "gemma3n", "granitehybrid-dense"])
def test_a_long_prompt_alone_has_steps_that_want_no_rows(name: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, output_kind=RequestOutputKind.FINAL_ONLY)
    whole = answers(tiny_engine(name, "torch"), [PROMPTS[-1]], params)
    assert answers(tiny_engine(name, "torch", max_num_batched_tokens=8), [PROMPTS[-1]], params) == whole


def windowed_engine(name: str, backend: str, num_blocks: int, *, max_num_seqs: int = 8) -> Engine:
    """With blocks of 8 tokens and steps of at most 16."""
    graph, weights = tiny_graph(name)
    limits = ExecutorLimits(16, max_num_seqs, max_num_seqs + 4, 128)
    executor: Executor
    if backend == "cpu":
        executor = get_backend("cpu").compile(graph, weights, limits)
    else:
        executor = exact_executor(backend, graph, weights, limits)
    executor.allocate_cache(num_blocks, 8)
    engine_limits = EngineLimits(128, max_num_seqs, 16, max_num_seqs + 4, 8, num_blocks, VOCAB_SIZE)
    return Engine(executor, Tokenizer(), engine_limits)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "cpu") for name in ("gemma3", "qwen2-window", "mistral-window")),
        *(pytest.param(name, "torch", marks=pytest.mark.slow) for name in ("gemma3", "qwen2-window")),
    ],
)
def test_blocks_that_left_a_window_are_used_again_and_no_answer_changes(name: str, backend: str) -> None:
    shared = [(7 * i) % VOCAB_SIZE for i in range(60)]
    prompts = [[*shared, 3], [*shared[:40], 5, 6], [8, 9, 10], [*shared, 3, 11, 12], shared[30:]]
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=30, output_kind=RequestOutputKind.FINAL_ONLY)
    alone = [answers(windowed_engine(name, backend, 400), [prompt], params)[0] for prompt in prompts]
    layout = windowed_engine(name, backend, 1).scheduler.kv_cache.layout
    longest, whole = layout.max_blocks(93, 8, 16), len(layout.groups) * 12
    assert longest < whole
    cramped = windowed_engine(name, backend, longest + 4)
    assert answers(cramped, prompts, params) == alone
    assert cramped.metrics.num_preemptions_total + cramped.scheduler.kv_cache.pool.num_evictions > 0
    roomy = windowed_engine(name, backend, 400)
    for _ in range(2):  # the second time most of each prompt comes from the cache
        assert answers(roomy, prompts, params) == alone
    assert roomy.metrics.num_prefix_hits_total > sum(map(len, prompts))


def test_grammars_penalties_and_log_probabilities_on_torch_are_those_of_the_specification() -> None:
    params = [
        SamplingParams(
            structured_outputs=StructuredOutputsParams(regex="[a-f]{3,9}"), seed=1, max_tokens=12, logprobs=2
        ),
        SamplingParams(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3, seed=2, max_tokens=12),
        SamplingParams(top_k=9, top_p=0.8, min_p=0.02, temperature=1.3, seed=3, n=2, max_tokens=12, prompt_logprobs=3),
        SamplingParams(logit_bias={7: 4.0, 9: -100.0}, bad_words=["ab"], min_tokens=4, seed=4, max_tokens=12),
    ]
    found = []
    for backend in ("reference", "torch"):
        engine = tiny_engine("llama", backend)
        for i, each in enumerate(params):
            engine.add_request(create_request(engine, str(i), PROMPTS[i], each))
        last = answers_of(engine)
        found.append([last[str(i)] for i in range(len(params))])
    for one, other in zip(*found, strict=True):
        for a, b in zip(one.outputs, other.outputs, strict=True):
            assert (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)
            assert [{t: round(x.logprob, 5) for t, x in y.items()} for y in a.logprobs or []] == [
                {t: round(x.logprob, 5) for t, x in y.items()} for y in b.logprobs or []
            ]
        assert repr(one.prompt_logprobs is None) == repr(other.prompt_logprobs is None)
        for x, y in zip(one.prompt_logprobs or [], other.prompt_logprobs or [], strict=True):
            assert (x and x.keys()) == (y and y.keys())
