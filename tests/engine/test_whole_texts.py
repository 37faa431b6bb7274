"""Encoders in the engine: each text in one step, whatever runs beside it."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.backends import ExecutorLimits, get_backend
from octavo.backends.cpu.lowering import PASSES
from octavo.engine.engine import Engine
from octavo.engine.limits import EngineLimits
from octavo.engine.texts.text_model import TextModel
from octavo.errors import UsageError
from octavo.generation_request import PoolingParams
from octavo.graph.passes import optimize
from octavo.models import build_graph, load_architecture
from octavo.models._reading import ConfigReader
from octavo.outputs import PoolingOutput
from octavo.quantization.packed import DenseWeight
from tests.support.fake_executor import FakeTokenizer, create_request
from tests.support.integrity import check_integrity
from tests.support.tiny_encoders import expected_states, tiny_encoder
from tests.support.tiny_models import graph_weights

LENGTHS = [5, 40, 1, 17, 64, 33, 2, 9]
TEXTS = [np.random.default_rng(i).integers(4, 60, n).tolist() for i, n in enumerate(LENGTHS)]
MODEL = tiny_encoder("bert")


def engine(step_tokens: int = 64, num_seqs: int = 4, backend: str = "cpu") -> Engine:
    config = load_architecture("bert").Config.from_hf(ConfigReader(MODEL.config.to_dict()))
    weights = {name: DenseWeight(array) for name, array in graph_weights(MODEL, "bert").items()}
    graph = optimize(build_graph("bert", config, {n: w.shape for n, w in weights.items()}), PASSES)
    executor = get_backend(backend).compile(graph, weights, ExecutorLimits(step_tokens, num_seqs, num_seqs, 64))
    executor.allocate_cache(4 * num_seqs, 16)
    limits = EngineLimits(64, num_seqs, step_tokens, num_seqs, 16, 4 * num_seqs, 96, enable_prefix_caching=False)
    texts = TextModel(generates=False, takes_whole_texts=True, pooling="mean", num_token_types=2)
    return Engine(executor, FakeTokenizer(), limits, texts)  # type: ignore[arg-type]


def run(subject: Engine) -> dict[str, np.ndarray]:
    vectors = {}
    while subject.has_work:
        for item in subject.step():
            assert isinstance(item, PoolingOutput)
            vectors[item.request_id] = item.vector
        check_integrity(subject.scheduler)
    assert subject.scheduler.kv_cache.pool.num_used_blocks == 0
    return vectors


@pytest.mark.parametrize(
    ("step_tokens", "num_seqs", "backend"), [(64, 4, "cpu"), (200, 8, "cpu"), (64, 1, "cpu"), (200, 8, "torch:cpu")]
)
def test_texts_fill_steps_and_stay_whole(step_tokens: int, num_seqs: int, backend: str) -> None:
    subject = engine(step_tokens, num_seqs, backend)
    for i, text in enumerate(TEXTS):
        subject.add_request(create_request(subject, f"t{i}", text, PoolingParams()))
    vectors = run(subject)
    for i, text in enumerate(TEXTS):
        expected = expected_states(MODEL, text).mean(axis=0)
        assert np.abs(vectors[f"t{i}"] - expected).max() < 1e-4 * np.abs(expected).max()


def test_the_order_is_that_of_service() -> None:
    subject, order = engine(64, 8), []
    for i, (text, priority) in enumerate([(TEXTS[4], 1), (TEXTS[4], 0), (TEXTS[2], 1)]):
        subject.add_request(create_request(subject, f"t{i}", text, PoolingParams(), priority=priority))
    while subject.has_work:
        order += [item.request_id for item in subject.step()]
    assert order == ["t1", "t0", "t2"]


def test_an_aborted_text_leaves_the_others() -> None:
    subject = engine()
    for i in range(4):
        subject.add_request(create_request(subject, f"t{i}", TEXTS[i], PoolingParams()))
    subject.abort("t1")
    assert sorted(run(subject)) == ["t0", "t2", "t3"]


def test_a_second_text_has_types_of_its_own() -> None:
    subject = engine()
    subject.add_request(create_request(subject, "a", TEXTS[3], PoolingParams(second_start=5)))
    subject.add_request(create_request(subject, "b", TEXTS[3], PoolingParams()))
    vectors = run(subject)
    for name, types in (("a", [0] * 5 + [1] * 12), ("b", [0] * 17)):
        expected = expected_states(MODEL, TEXTS[3], types).mean(axis=0)
        assert np.abs(vectors[name] - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("second_start", [-1, 18])
def test_a_second_text_outside_the_prompt_is_refused(second_start: int) -> None:
    subject = engine()
    with pytest.raises(UsageError, match=f"second_start is {second_start}, but the text has 17 tokens"):
        create_request(subject, "a", TEXTS[3], PoolingParams(second_start=second_start))
