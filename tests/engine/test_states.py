"""Models with states in the engine: forks, prefixes, failed steps and drafts, with the answers of the model alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from octavo.backends import Executor, ExecutorLimits, PendingStep, get_backend
from octavo.backends.cpu.lowering import PASSES
from octavo.backends.sampling import RowError, SamplingError
from octavo.batch import Batch
from octavo.engine.engine import Engine, RequestFailure
from octavo.engine.limits import EngineLimits
from octavo.engine.schedule import Schedule
from octavo.errors import NumericalError
from octavo.graph.passes import optimize
from octavo.outputs import OutputDelta
from octavo.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from tests.engine.test_model_runs import VOCAB_SIZE, Tokenizer, answers, exact_executor, tiny_engine
from tests.support.drafting import AnyPolicy, ScriptedSource, with_drafts
from tests.support.fake_executor import create_request
from tests.support.integrity import check_integrity
from tests.support.tiny_hybrids import HYBRIDS
from tests.support.tiny_models import tiny_graph, tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=6, output_kind=RequestOutputKind.FINAL_ONLY)
SHARED = [(7 * i) % VOCAB_SIZE for i in range(30)]
PROMPTS = [[*SHARED, 3], [*SHARED, 5, 6], [8, 9, 10], [*SHARED, 3, 11, 12, 13, 14]]


def native_engine(
    name: str,
    backend: str = "cpu",
    *,
    num_states: int = 8,
    max_num_seqs: int = 4,
    caching: bool = True,
    num_draft_states: int = 0,
) -> Engine:
    """With blocks of 8 tokens and steps of at most 16."""
    graph, weights = tiny_graph(name)
    limits = ExecutorLimits(16, max_num_seqs, max_num_seqs + 4, 64)
    if backend == "cpu":
        executor: Executor = get_backend("cpu").compile(optimize(graph, PASSES), weights, limits)
    else:
        executor = exact_executor(backend, graph, weights, limits)
    executor.allocate_cache(40, 8, num_states)
    engine_limits = EngineLimits(
        64,
        max_num_seqs,
        16,
        max_num_seqs + 4,
        8,
        40,
        VOCAB_SIZE,
        enable_prefix_caching=caching,
        num_states=num_states,
        num_draft_states=num_draft_states,
    )
    return Engine(executor, Tokenizer(), engine_limits)


# On torch, all but one hybrid are slow.
WITH_TORCH = [
    *((name, "cpu") for name in HYBRIDS),
    *(pytest.param(name, "torch", marks=() if name == "lfm2" else pytest.mark.slow) for name in HYBRIDS),
]


@pytest.mark.parametrize(("name", "backend"), WITH_TORCH)
def test_a_prefix_is_reused_where_its_states_were_kept(name: str, backend: str) -> None:
    alone = [answers(native_engine(name, backend, caching=False), [prompt], GREEDY)[0] for prompt in PROMPTS]
    engine = native_engine(name, backend)
    metrics, hits = engine.metrics, []
    for prompt, expected in zip(PROMPTS, alone, strict=True):
        before = metrics.num_prefix_hits_total
        assert answers(engine, [prompt], GREEDY)[0] == expected
        hits.append(metrics.num_prefix_hits_total - before)
    # The chunks of the first prompt end at 16 and 31 tokens: states are kept at 8, and at 24.
    assert hits == [0, 24, 0, 24]
    assert answers(engine, PROMPTS, GREEDY) == alone


@pytest.mark.parametrize("name", HYBRIDS)
def test_without_the_blocks_or_the_states_nothing_is_reused(name: str) -> None:
    engine = native_engine(name)
    expected = answers(engine, PROMPTS[:1], GREEDY)
    states, pool = engine.scheduler.kv_cache.states, engine.scheduler.kv_cache.pool
    assert states is not None
    kept = [slot for slot in range(8) if states.pool.is_findable(slot)]
    assert kept
    for slot in kept:
        states.pool.discard(slot)
    assert answers(engine, PROMPTS[:1], GREEDY) == expected
    assert engine.metrics.num_prefix_hits_total == 0
    for block_id in range(40):
        pool.discard(block_id)
    assert answers(engine, PROMPTS[:1], GREEDY) == expected
    assert engine.metrics.num_prefix_hits_total == 0


@pytest.mark.parametrize("name", HYBRIDS)
def test_many_prompts_over_few_slots(name: str) -> None:
    """Snapshots take only slots that nobody needs, and give them back."""
    rng = np.random.default_rng(0)
    lengths = rng.integers((0, 1), (30, 9), (12, 2)).tolist()
    prompts = [[*SHARED[:shared], *rng.integers(0, VOCAB_SIZE, own).tolist()] for shared, own in lengths]
    params = SamplingParams(n=2, seed=5, temperature=1.0, max_tokens=7, output_kind=RequestOutputKind.FINAL_ONLY)
    alone = [answers(native_engine(name, caching=False), [prompt], params)[0] for prompt in prompts]
    engine = native_engine(name, num_states=8, max_num_seqs=4)
    for _ in range(3):
        assert answers(engine, prompts, params) == alone
    assert engine.metrics.num_prefix_hits_total > 0


@pytest.mark.parametrize(
    ("name", "backend", "preempted_at"),
    [
        *((name, "reference", at) for name in HYBRIDS for at in (0, 5, 9)),
        *(pytest.param(name, "torch", 5, marks=pytest.mark.slow) for name in HYBRIDS),
    ],
)
def test_beams_are_those_of_transformers(name: str, backend: str, preempted_at: int) -> None:
    """Beams fork in every step; a preempted search is computed again."""
    engine = tiny_engine(name, backend, max_num_seqs=8, max_num_batched_tokens=16)
    prompts = [[1, 5, 9, 30, 31, 70], [4, 90, 17]]
    params = BeamSearchParams(beam_width=4, max_tokens=12)
    for i, prompt in enumerate(prompts):
        engine.add_request(create_request(engine, str(i), prompt, params))
    found = {}
    steps = itertools.count(1)
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] = output
        if next(steps) == preempted_at:
            engine.admission.preempt(engine.admission.queue.running[-1], Schedule(0, 0, 0))
        check_integrity(engine.scheduler)
    model = tiny_model(name).double()
    model.generation_config.eos_token_id = None
    search = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    for i, prompt in enumerate(prompts):
        expected = model.generate(torch.tensor([prompt]), **search)
        output = found[str(i)]
        assert isinstance(output, OutputDelta)
        assert [choice.token_ids for choice in output.outputs] == expected[:, len(prompt) :].tolist()
    assert engine.metrics.num_preemptions_total == bool(preempted_at)


@pytest.mark.parametrize(("name", "backend"), WITH_TORCH)
def test_after_a_failed_step_the_others_are_computed_again(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [*PROMPTS[:2], [3, 4, 5]]
    alone = [answers(native_engine(name, backend), [prompt], GREEDY)[0] for prompt in prompts]
    engine = native_engine(name, backend)
    for i, prompt in enumerate(prompts):
        engine.add_request(create_request(engine, str(i), prompt, GREEDY))
    submit, steps = engine.executor.submit, itertools.count()

    class FailedStep:
        """The step has been computed, and its first row has no outcome."""

        def __init__(self, batch: Batch) -> None:
            submit(batch).wait()

        def wait(self) -> None:
            raise SamplingError({0: RowError("made up", NumericalError)})

    monkeypatch.setattr(engine.executor, "submit", lambda batch: (FailedStep if next(steps) == 6 else submit)(batch))
    found = {}
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] = output
        check_integrity(engine.scheduler)
    failed = [request_id for request_id, output in found.items() if isinstance(output, RequestFailure)]
    assert len(failed) == 1
    for i, expected in enumerate(alone):
        if str(i) not in failed:
            assert [choice.token_ids for choice in found[str(i)].outputs] == expected
    assert engine.metrics.num_preemptions_total > 0


SAMPLED = SamplingParams(n=2, seed=5, temperature=1.0, max_tokens=9, output_kind=RequestOutputKind.FINAL_ONLY)


@pytest.mark.parametrize("params", [replace(GREEDY, max_tokens=20), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "rule", [lambda _: True, lambda i: i % 3 != 1, lambda _: False], ids=["right", "some", "wrong"]
)
@pytest.mark.parametrize(("name", "backend"), WITH_TORCH)
def test_drafts_change_no_answer(name: str, backend: str, rule: Callable[[int], bool], params: SamplingParams) -> None:
    """The states go back to those before the first wrong draft; a prefix is found whatever was guessed behind it."""
    alone = answers(native_engine(name, backend), PROMPTS, params)
    source = ScriptedSource({str(i): choices for i, choices in enumerate(alone)}, rule)
    engine = with_drafts(native_engine(name, backend, num_states=14, num_draft_states=6), source, AnyPolicy(3, least=3))
    assert engine.speculation is not None
    for _ in range(2):
        assert answers(engine, PROMPTS, params) == alone
    drafted, right = (
        counts["script"]
        for counts in (engine.metrics.num_draft_tokens_total, engine.metrics.num_accepted_draft_tokens_total)
    )
    assert drafted > 40
    assert right == drafted if rule(1) else right < drafted
    assert engine.metrics.num_prefix_hits_total
    states = engine.scheduler.kv_cache.states
    assert states is not None
    assert states.num_draft_slots_left == 6


@pytest.mark.parametrize("name", HYBRIDS)
def test_drafts_with_preemptions_aborts_and_failed_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = replace(GREEDY, max_tokens=16)
    alone = answers(native_engine(name), PROMPTS, params)
    source = ScriptedSource({str(i): choices for i, choices in enumerate(alone)}, lambda i: i % 4 != 3)
    engine = with_drafts(native_engine(name, num_states=14, num_draft_states=6), source, AnyPolicy(3, least=2))
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(create_request(engine, str(i), prompt, params))
    submit = engine.executor.submit
    failed: list[Batch] = []

    class FailedStep:
        """The step has been computed, and the row of its first draft has no outcome."""

        def __init__(self, batch: Batch) -> None:
            submit(batch).wait()
            failed.append(batch)

        def wait(self) -> None:
            batch = failed[-1]
            sequence = int(np.argmax((batch.state_saves[:, :2, 1] >= 0).all(axis=1)))
            row = batch.logits_indices.tolist().index(batch.query_start_loc[sequence] + 1)
            raise SamplingError({row: RowError("made up", NumericalError)})

    def submitted(batch: Batch) -> PendingStep:
        has_drafts = batch.state_saves is not None and batch.state_saves.shape[1] > 1
        return FailedStep(batch) if has_drafts and len(failed) < 2 else submit(batch)

    monkeypatch.setattr(engine.executor, "submit", submitted)
    found = {}
    steps = itertools.count(1)
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] = output
        at = next(steps)
        if at == 7:
            engine.admission.preempt(engine.admission.queue.running[-1], Schedule(0, 0, 0))
        if at == 9:
            engine.start()
            engine.abort("3")
            engine.finish()
        check_integrity(engine.scheduler)
    assert len(failed) == 2
    for i in range(3):
        assert [choice.token_ids for choice in found[str(i)].outputs] == alone[i]


def test_without_slots_for_drafts_there_are_none() -> None:
    name = HYBRIDS[0]
    alone = answers(native_engine(name), PROMPTS, GREEDY)
    source = ScriptedSource({str(i): choices for i, choices in enumerate(alone)})
    engine = with_drafts(native_engine(name), source, AnyPolicy(3, least=3))
    assert answers(engine, PROMPTS, GREEDY) == alone
    assert engine.metrics.num_drafts_total == 0
