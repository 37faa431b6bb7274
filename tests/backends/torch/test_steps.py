"""Steps of every architecture on torch tensors: chunks, single tokens and strangers change nothing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from octavo.backends import Executor, get_backend, reference
from octavo.graph.builder import Graph
from octavo.quantization.packed import Weight
from tests.models.test_steps import (  # noqa: F401 - run here with the fixtures below
    LIMITS,
    assert_first_steps_may_want_no_rows,
    in_chunks,
    test_chunks_and_single_tokens,
    test_hidden_states_beside_logits,
    test_only_wanted_rows,
    test_with_strangers,
)
from tests.support.tiny_models import CONFIGS, NUM_CACHE_GROUPS, tiny_graph

QUICK = {"llama", "gemma2", "gemma3n", "gpt-oss", "deepseek3", "qwen35", "lfm2", "granitehybrid-dense", "bloom"}

Model = tuple[Graph, dict[str, Weight]]


@pytest.fixture(scope="module", params=[pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CONFIGS])
def model(request: pytest.FixtureRequest) -> Model:
    return tiny_graph(request.param)


@pytest.fixture(scope="module")
def executor(model: Model) -> Iterator[Executor]:
    executor = get_backend("torch:cpu").compile(*model, LIMITS)
    executor.allocate_cache(32 * NUM_CACHE_GROUPS, 16, 32)
    yield executor
    executor.close()


def test_logits_are_those_of_the_specification(model: Model, executor: Executor) -> None:
    judge = reference.compile(*model, LIMITS, kv_dtype="float16")
    judge.allocate_cache(32 * NUM_CACHE_GROUPS, 16, 32)
    expected = in_chunks(judge, [30])
    found = in_chunks(executor, [17, 12, 1])
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-3 * np.abs(expected).max())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_that_wants_no_rows(name: str) -> None:
    """None of a last layer's operations has any rows then: a tenth of a second for each architecture."""
    executor = get_backend("torch:cpu").compile(*tiny_graph(name), LIMITS)
    executor.allocate_cache(32 * NUM_CACHE_GROUPS, 16, 32)
    assert_first_steps_may_want_no_rows(executor)
    executor.close()
