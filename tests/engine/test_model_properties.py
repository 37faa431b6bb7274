"""The same random engine runs with models: preemption, prefixes, forks, beams, grammars, drafts, embeddings.

Each answer is that of the request alone. Over the native kernels it has the same bits; over torch tensors in float64 a
product depends so little on its shape that no token does.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from octavo.backends import Executor, ExecutorLimits, PendingStep
from octavo.batch import Batch
from octavo.engine.engine import Engine, RequestFailure
from octavo.engine.limits import EngineLimits
from octavo.outputs import OutputDelta, PoolingOutput
from tests.engine.test_engine_properties import _SETTINGS, MAX_MODEL_LEN, EngineMachine, Spec, make_params
from tests.engine.test_model_runs import VOCAB_SIZE, exact_executor
from tests.support.fake_executor import FakeTokenizer, create_request
from tests.support.tiny_models import NUM_CACHE_GROUPS, tiny_graph


class Tokenizer(FakeTokenizer):
    vocab_size = VOCAB_SIZE


class Counted:
    """An executor that counts its steps. All else is that of the executor."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.num_steps = 0
        self.max_in_flight, self.is_deferred = 1, False

    def submit(self, batch: Batch) -> PendingStep:
        self.num_steps += 1
        return self.executor.submit(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.executor, name)


class ModelMachine(EngineMachine):
    model, backend = "llama", "torch"
    known: ClassVar[dict[Spec, OutputDelta | PoolingOutput]]

    def make_engine(
        self,
        num_blocks: int,
        windows: tuple[int | None, ...],  # noqa: ARG002 - the model has its own
        num_stages: int,  # noqa: ARG002 - there is one
        **limits: Any,
    ) -> Engine:
        graph, weights = tiny_graph(self.model)
        groups = len(graph.cache_layout.groups)
        seqs, tokens, outputs = limits["max_num_seqs"], limits["max_num_batched_tokens"], limits["max_num_outputs"]
        executor = Counted(
            exact_executor(self.backend, graph, weights, ExecutorLimits(tokens, seqs, outputs, MAX_MODEL_LEN))
        )
        num_states = 2 * seqs if graph.state_caches else 0
        block_size = 8 if self.backend == "cpu" else 4
        executor.allocate_cache(num_blocks * groups, block_size, num_states)
        engine_limits = EngineLimits(
            block_size=block_size,
            num_blocks=num_blocks * groups,
            vocab_size=VOCAB_SIZE,
            num_states=num_states,
            **limits,
        )
        return Engine(executor, Tokenizer(), engine_limits)  # type: ignore[arg-type]

    def alone(self, spec: Spec) -> OutputDelta | PoolingOutput:
        if spec not in self.known:
            limits = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "max_num_outputs": 64}
            engine = self.make_engine(128, (None,), 1, max_model_len=MAX_MODEL_LEN, **limits)
            engine.add_request(create_request(engine, "alone", spec[0], make_params(spec)))
            while engine.has_work:
                for output in engine.step():
                    assert not isinstance(output, RequestFailure)
                    self.known[spec] = output
        return self.known[spec]

    def check_logprobs(self, found: Any, expected: Any) -> None:
        if self.backend == "cpu":
            assert found == expected
            return
        assert (found is None) == (expected is None)
        for one, other in zip(found or [], expected or [], strict=True):
            assert (one and one.keys()) == (other and other.keys())
            for token, entry in (one or {}).items():
                assert entry.logprob == pytest.approx(other[token].logprob, abs=1e-5)
                assert (entry.rank, entry.decoded_token) == (other[token].rank, other[token].decoded_token)


def machine(name: str, backend: str) -> type[ModelMachine]:
    """Hybrids draft nothing: their states cannot go back."""
    is_hybrid = bool(tiny_graph(name)[0].state_caches)
    return type(
        "Machine", (ModelMachine,), {"model": name, "backend": backend, "known": {}, "may_draft": not is_hybrid}
    )


@pytest.mark.parametrize(("backend", "count"), [("cpu", 4), ("torch", 2)])
def test_runs(backend: str, count: int) -> None:
    run_state_machine_as_test(machine("llama", backend), settings=settings(_SETTINGS, max_examples=count))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2", "deepseek3"])
@pytest.mark.parametrize(("backend", "count"), [("cpu", 60), ("torch", 12)])
def test_many_more_runs(name: str, backend: str, count: int) -> None:
    assert len(tiny_graph(name)[0].cache_layout.groups) <= NUM_CACHE_GROUPS
    run_state_machine_as_test(machine(name, backend), settings=settings(_SETTINGS, max_examples=count))
