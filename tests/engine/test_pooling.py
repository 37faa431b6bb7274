"""Embeddings: the pooled last hidden states of prompts, whatever they are computed beside."""

from __future__ import annotations

import queue

import numpy as np
import pytest
import torch

from octavo.backends import ExecutorLimits, get_backend
from octavo.backends.cpu.lowering import PASSES
from octavo.batch import Float32
from octavo.engine.engine import Engine, RequestFailure
from octavo.engine.engine_thread import EngineThread
from octavo.engine.limits import EngineLimits
from octavo.errors import EngineDeadError, OctavoError, UsageError
from octavo.generation_request import Pooling, PoolingParams
from octavo.graph.passes import optimize
from octavo.outputs import OutputDelta, PoolingOutput
from octavo.sampling_params import SamplingParams
from tests.support import tiny_models
from tests.support.fake_executor import FakeTokenizer, create_request
from tests.support.integrity import check_integrity

VOCAB = 96
PROMPTS = [np.random.default_rng(i).integers(0, 60, n).tolist() for i, n in enumerate([5, 40, 1, 17, 90, 33])]


def engine(name: str = "llama", backend: str = "cpu", *, num_blocks: int = 24, max_model_len: int = 128) -> Engine:
    graph, weights = tiny_models.tiny_graph(name)
    num_states = 8 if graph.state_caches else 0
    limits = EngineLimits(max_model_len, 4, 32, 20, 8, num_blocks, VOCAB, num_states=num_states)
    executor = get_backend(backend).compile(optimize(graph, PASSES), weights, ExecutorLimits(32, 4, 20, max_model_len))
    executor.allocate_cache(num_blocks, 8, num_states)
    return Engine(executor, FakeTokenizer(), limits)  # type: ignore[arg-type]


def embed(engine: Engine, prompts: list[list[int]], pooling: Pooling) -> list[Float32]:
    for i, prompt in enumerate(prompts):
        engine.add_request(create_request(engine, f"e{i}", prompt, PoolingParams(pooling=pooling)))
    vectors: dict[str, Float32] = {}
    while engine.has_work:
        for item in engine.step():
            if isinstance(item, PoolingOutput):
                vectors[item.request_id] = item.vector
        check_integrity(engine.scheduler)
    assert engine.scheduler.kv_cache.pool.num_used_blocks == 0
    return [vectors[f"e{i}"] for i in range(len(prompts))]


@pytest.mark.parametrize("name", tiny_models.CONFIGS)
def test_hidden_states_are_those_of_transformers(name: str) -> None:
    model = tiny_models.tiny_model(name)
    with torch.no_grad():
        output = model(torch.tensor([PROMPTS[1]]), output_hidden_states=True)
        last = output.hidden_states[-1]  # after the last norm
        if name.startswith("gemma3n"):  # whose last ones are streams before it
            last = model.base_model(torch.tensor([PROMPTS[1]])).last_hidden_state
    expected = last[0].double().numpy()
    subject = engine(name, "reference", num_blocks=24 * tiny_models.NUM_CACHE_GROUPS)
    for pooling, wanted in (("mean", expected.mean(axis=0)), ("last", expected[-1])):
        (vector,) = embed(subject, [PROMPTS[1]], pooling)  # type: ignore[arg-type]
        assert np.abs(vector - wanted).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("pooling", "backend"),
    [
        ("mean", "cpu"),
        ("last", "cpu"),
        ("mean", "torch:cpu"),
        pytest.param("last", "torch:cpu", marks=pytest.mark.slow),
    ],
)
def test_together_alone_and_beside_generation(pooling: Pooling, backend: str) -> None:
    alone = [embed(engine(backend=backend), [prompt], pooling)[0] for prompt in PROMPTS]
    together = embed(engine(backend=backend), PROMPTS, pooling)
    busy = engine(backend=backend)
    for i in range(3):
        busy.add_request(create_request(busy, f"g{i}", PROMPTS[i], SamplingParams(max_tokens=20, temperature=0)))
    beside = embed(busy, PROMPTS, pooling)
    for a, b, c in zip(alone, together, beside, strict=True):
        # The order of a float64 sum; torch's products depend on how many rows there are.
        tolerance = 2e-6 if backend == "cpu" else 5e-3 * np.abs(a).max()
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)
        np.testing.assert_allclose(a, c, rtol=0, atol=tolerance)
    assert len({vector.tobytes() for vector in alone}) == len(PROMPTS)


def test_generation_is_the_same_beside_embeddings() -> None:
    def generate(with_embeddings: bool) -> list[list[int]]:
        subject = engine(num_blocks=20)  # too few for all at once
        for i in range(4):
            params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
            subject.add_request(create_request(subject, f"g{i}", PROMPTS[i], params))
        tokens: dict[str, list[int]] = {}
        if with_embeddings:
            for i, prompt in enumerate(PROMPTS):
                subject.add_request(create_request(subject, f"e{i}", prompt, PoolingParams(pooling="mean")))
        while subject.has_work:
            for item in subject.step():
                if isinstance(item, OutputDelta):
                    tokens[item.request_id] = tokens.get(item.request_id, []) + item.outputs[0].token_ids
        return [tokens[f"g{i}"] for i in range(4)]

    assert generate(with_embeddings=True) == generate(with_embeddings=False)


def test_refusals() -> None:
    subject = engine(num_blocks=4, max_model_len=64)
    for prompt, code in (([], "empty_array"), ([VOCAB], "token_out_of_range"), ([1] * 33, "context_length_exceeded")):
        with pytest.raises(UsageError) as caught:
            create_request(subject, "e", prompt, PoolingParams(pooling="mean"))
        assert caught.value.code == code
    assert len(embed(subject, [[1] * 32], "mean")[0]) == embed(subject, [[1]], "last")[0].size


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_prompt_may_fill_the_context(pooling: Pooling) -> None:
    """No answer needs room."""
    subject = engine(num_blocks=8, max_model_len=64)
    assert len(embed(subject, [[1] * 64], pooling)) == 1
    with pytest.raises(UsageError, match=r"65 tokens; the context of 64 allows at most 64\."):
        create_request(subject, "e", [1] * 65, PoolingParams(pooling=pooling))


def test_abort_and_close() -> None:
    items: queue.SimpleQueue[PoolingOutput | OctavoError] = queue.SimpleQueue()
    subject = engine()
    first = create_request(subject, "a", PROMPTS[4], PoolingParams(pooling="mean"))
    subject.add_request(first)
    subject.step()
    assert subject.scheduler.kv_cache.pool.num_used_blocks > 0
    aborted = subject.abort("a")
    assert isinstance(aborted, RequestFailure)
    assert isinstance(aborted.error, OctavoError)
    assert subject.scheduler.kv_cache.pool.num_used_blocks == 0
    assert not subject.has_work
    thread = EngineThread(subject)
    thread.submit(create_request(subject, "b", PROMPTS[0], PoolingParams(pooling="last")), items.put)
    assert isinstance(items.get(timeout=10), PoolingOutput)
    thread.close()
    with pytest.raises(EngineDeadError):
        thread.submit(create_request(subject, "c", PROMPTS[0], PoolingParams(pooling="last")), items.put)
