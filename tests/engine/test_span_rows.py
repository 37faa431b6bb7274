"""A tiny model whose graph takes spans: rows that are embeddings of tokens give the answers to these tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from octavo.backends import ExecutorLimits
from octavo.batch import Float32
from octavo.engine.engine import Engine
from octavo.engine.limits import EngineLimits
from octavo.generation_request import Params, PoolingParams
from octavo.graph.builder import Graph
from octavo.graph.ops.linear import Embedding
from octavo.graph.spans import SPANS, span_width, splice_spans
from octavo.graph.values import Value
from octavo.prompt import Prompt, Span
from octavo.sampling_params import SamplingParams
from tests.engine.test_model_runs import VOCAB_SIZE, Tokenizer, exact_executor
from tests.support.answers import Answers
from tests.support.fake_executor import create_request
from tests.support.integrity import check_integrity
from tests.support.tiny_models import tiny_graph

PARAMS = SamplingParams(temperature=0, max_tokens=6, logprobs=3, ignore_eos=True)
TOKENS = [1, 5, 9, 30, 31, 70, 11, 12, 13, 14, 90, 91, 17, 18]

pytestmark = pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])


class Model:
    """A tiny model that splices, with the table of its embeddings."""

    def __init__(self, name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
        embedding: Callable[..., Value] = Graph.embedding
        monkeypatch.setattr(
            Graph, "embedding", lambda g, stem, **options: splice_spans(g, embedding(g, stem, **options))
        )
        self.backend = backend
        self.graph, self.weights = tiny_graph(name)
        op = next(node.op for node in self.graph.nodes if isinstance(node.op, Embedding))
        self.table = self.weights[op.weight.name].dequantize().astype(np.float32)
        assert span_width(self.graph) == self.table.shape[1]

    def engine(self, *, budget: int = 64, num_blocks: int = 256, num_seqs: int = 8) -> Engine:
        limits = ExecutorLimits(budget, num_seqs, num_seqs + 4, 64, further_rows={SPANS: budget})
        executor = exact_executor(self.backend, self.graph, self.weights, limits)
        block_size = 8 if self.backend == "cpu" else 4
        executor.allocate_cache(num_blocks, block_size, 2 * num_seqs)
        return Engine(
            executor,
            Tokenizer(),
            EngineLimits(
                64,
                num_seqs,
                budget,
                num_seqs + 4,
                block_size,
                num_blocks,
                VOCAB_SIZE,
                span_width=span_width(self.graph),
                num_states=2 * num_seqs if executor.cache_sizes.state_bytes else 0,
            ),
        )

    def spanned(self, token_ids: Sequence[int], *places: tuple[int, int], key: bytes = b"content") -> Prompt:
        """The prompt with embeddings in place of the tokens at these places."""
        ids, spans = list(token_ids), []
        for start, end in places:
            values: Float32 = self.table[ids[start:end]]
            spans.append(Span(start, end - start, key, values))
            ids[start:end] = [0] * (end - start)
        return Prompt(ids, spans)


@pytest.fixture(params=["reference", pytest.param("torch", marks=pytest.mark.slow), "cpu"])
def model(name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Model:
    return Model(name, request.param, monkeypatch)


def run(engine: Engine, prompts: Sequence[Prompt], params: Params = PARAMS) -> list[Any]:
    """The last outputs of all, which run together in the loop of an engine's thread."""
    for i, prompt in enumerate(prompts):
        engine.add_request(create_request(engine, str(i), prompt, params))
    found = Answers()
    while engine.has_work:
        engine.start()
        found.take(engine.publish())
        engine.prepare()
        engine.finish()
    check_integrity(engine.scheduler)
    return [found[str(i)] for i in range(len(prompts))]


def told(output: Any) -> list[object]:
    """Tokens and log-probabilities of all choices, to the last bit."""
    return [(choice.token_ids, choice.logprobs) for choice in output.outputs]


@pytest.mark.parametrize("budget", [64, 5, 3])
@pytest.mark.parametrize("places", [((2, 9),), ((0, 3), (3, 4), (9, 13)), ((0, 14),)])
def test_embeddings_of_tokens_answer_as_the_tokens(model: Model, places: Any, budget: int) -> None:
    """Chunks of 5 and 3 tokens cut the spans."""
    [plain] = run(model.engine(), [Prompt(TOKENS)])
    [found] = run(model.engine(budget=budget, num_seqs=2), [model.spanned(TOKENS, *places)])
    assert told(found) == told(plain)
    [other] = run(model.engine(), [Prompt([0 if 2 <= i < 9 else token for i, token in enumerate(TOKENS)])])
    assert told(other) != told(plain)


def test_choices_share_the_span_of_their_prompt(model: Model) -> None:
    params: Params = SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=5, logprobs=0, ignore_eos=True)
    [plain] = run(model.engine(), [Prompt(TOKENS)], params)
    [found] = run(model.engine(budget=6, num_seqs=4), [model.spanned(TOKENS, (2, 9))], params)
    assert told(found) == told(plain)


def test_requests_with_and_without_spans_share_steps(model: Model) -> None:
    tokens = [[*TOKENS[i:], *TOKENS[:i]] for i in range(5)]
    mixed = [model.spanned(ids, (i, 6 + i)) if i % 2 else Prompt(ids) for i, ids in enumerate(tokens)]
    alone = [told(run(model.engine(), [Prompt(ids)])[0]) for ids in tokens]
    assert [told(output) for output in run(model.engine(budget=9, num_seqs=5), mixed)] == alone


@pytest.mark.parametrize("steps", [1, 4])
def test_a_preempted_request_has_its_span_computed_again(model: Model, steps: int) -> None:
    """It is preempted within the span, or while it answers."""
    [plain] = run(model.engine(), [Prompt(TOKENS)])
    engine = model.engine(budget=5, num_seqs=1)
    engine.add_request(create_request(engine, "preempted", model.spanned(TOKENS, (2, 9)), PARAMS))
    found = Answers()
    for _ in range(steps):
        found.take(engine.step())
    engine.scheduler.kv_cache.discard_all()  # its blocks are not found again
    engine.add_request(create_request(engine, "first", [7, 8, 9], PARAMS, priority=-1))
    while engine.has_work:
        found.take(engine.step())
    assert engine.metrics.num_preemptions_total == 1
    assert told(found["preempted"]) == told(plain)


def test_the_prefix_cache_shares_spans_of_equal_keys(model: Model) -> None:
    others = [40, 41, 42, 43, 44, 45, 46]
    tokens = TOKENS * 2
    changed = [*tokens[:9], *others, *tokens[16:]]
    first, second = (
        model.spanned(tokens, (9, 16)),
        model.spanned(changed, (9, 16), key=b"other"),
    )
    plain = [told(run(model.engine(), [Prompt(ids)])[0]) for ids in (tokens, changed)]
    engine = model.engine()
    found = [run(engine, [prompt])[0] for prompt in (first, first, second)]
    assert [told(output) for output in found] == [plain[0], plain[0], plain[1]]
    assert plain[0] != plain[1]
    size = engine.scheduler.kv_cache.block_size
    num_cached = [output.metrics.num_cached_tokens for output in found]
    assert num_cached[0] == 0
    assert num_cached[1] >= 16  # all of the span
    assert num_cached[2] in (8 // size * size, 0)  # 0: there is no snapshot of states so early


def test_the_vector_of_a_prompt_has_its_spans(model: Model) -> None:
    params = PoolingParams(pooling="mean")
    [plain] = run(model.engine(), [Prompt(TOKENS)], params)
    [found] = run(model.engine(budget=5), [model.spanned(TOKENS, (2, 9))], params)
    np.testing.assert_array_equal(found.vector, plain.vector)
