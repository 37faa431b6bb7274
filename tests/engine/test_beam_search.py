"""Beam search against transformers, on tiny models that the reference backend computes in float64."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from octavo.backends import ExecutorLimits, reference
from octavo.batch import StepOutput
from octavo.engine.consumers.row_consumer import Outcome, RowUse
from octavo.engine.engine import Engine
from octavo.engine.limits import EngineLimits
from octavo.engine.request import FinishReason, SequenceGroup
from octavo.outputs import OutputDelta
from octavo.quantization.packed import DenseWeight
from octavo.sampling_params import BeamSearchParams, SamplingParams
from tests.engine.test_model_runs import exact_executor
from tests.support.answers import answers_of
from tests.support.fake_executor import FakeTokenizer, create_request, fake_engine
from tests.support.integrity import check_integrity
from tests.support.tiny_models import tiny_graph, tiny_model

EOS_ID = 2
VOCAB_SIZE = 96


class Tokenizer(FakeTokenizer):
    vocab_size = VOCAB_SIZE
    eos_token_ids = frozenset({EOS_ID})

    def token_bytes(self, token_id: int) -> bytes:
        return b"t%d" % token_id


def tiny_engine(num_blocks: int = 256, max_num_batched_tokens: int = 32) -> Engine:
    graph, weights = tiny_graph("llama")
    limits = ExecutorLimits(max_num_batched_tokens, 8, 12, 64)
    executor = reference.compile(graph, weights, limits, dtype="float64")
    executor.allocate_cache(num_blocks, 4)
    return Engine(executor, Tokenizer(), EngineLimits(64, 8, max_num_batched_tokens, 12, 4, num_blocks, VOCAB_SIZE))


def search(engine: Engine, prompt: list[int], params: BeamSearchParams) -> OutputDelta:
    engine.add_request(create_request(engine, "beams", prompt, params))
    while engine.has_work:
        outputs = engine.step()
        check_integrity(engine.scheduler)
    (output,) = outputs
    assert isinstance(output, OutputDelta)
    return output


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama").double()


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "boost"),
    [
        (False, 1.0, 0.0),
        (False, 1.0, 5.0),
        (False, 2.0, 6.0),
        (False, -1.0, 3.0),
        (True, 1.0, 5.0),
        (True, 0.0, 4.0),
        ("never", 1.0, 4.0),
        ("never", 0.0, 4.0),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_beams_are_those_of_transformers(
    model: PreTrainedModel, early_stopping: bool | Literal["never"], length_penalty: float, boost: float, backend: str
) -> None:
    graph, weights = tiny_graph("llama")
    head = weights["lm_head.weight"].data.copy()
    # The boost makes the end of text likely, so that beams finish at different lengths.
    head[EOS_ID] += boost / 8 * np.random.default_rng(3).normal(size=64)
    model.lm_head.weight.data = torch.from_numpy(head).double()
    weights = {**weights, "lm_head.weight": DenseWeight(head)}
    executor = exact_executor(backend, graph, weights, ExecutorLimits(32, 8, 12, 64))
    executor.allocate_cache(256, 4)
    engine = Engine(executor, Tokenizer(), EngineLimits(64, 8, 32, 12, 4, 256, VOCAB_SIZE))
    reasons = set()
    for prompt in ([1, 5, 9, 30, 31, 70], [4, 90]):
        params = BeamSearchParams(
            beam_width=4, max_tokens=10, length_penalty=length_penalty, early_stopping=early_stopping
        )
        output = search(engine, prompt, params)
        expected = model.generate(
            torch.tensor([prompt]),
            num_beams=4,
            num_return_sequences=4,
            max_new_tokens=10,
            do_sample=False,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            pad_token_id=EOS_ID,
            return_dict_in_generate=True,
            output_scores=True,
        )
        for choice, tokens, score in zip(
            output.outputs, expected.sequences.tolist(), expected.sequences_scores.tolist(), strict=True
        ):
            generated = tokens[len(prompt) :]
            if EOS_ID in generated:
                generated = generated[: generated.index(EOS_ID) + 1]
            assert choice.token_ids == generated
            assert choice.cumulative_logprob is not None
            assert choice.cumulative_logprob / len(generated) ** length_penalty == pytest.approx(score, rel=1e-4)
            assert choice.finish_reason == ("stop" if generated[-1] == EOS_ID else "length")
            reasons.add(choice.finish_reason)
    assert boost == 0 or "stop" in reasons


def test_one_beam_is_greedy() -> None:
    engine = tiny_engine()
    beam = search(engine, [1, 5, 9], BeamSearchParams(beam_width=1, max_tokens=8, ignore_eos=True)).outputs[0]
    engine.add_request(
        create_request(engine, "greedy", [1, 5, 9], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    )
    output = answers_of(engine)["greedy"]
    assert isinstance(output, OutputDelta)
    assert beam.token_ids == output.outputs[0].token_ids


def test_beams_share_blocks_and_give_them_back() -> None:
    engine = fake_engine(num_blocks=64, block_size=4, max_num_batched_tokens=64)
    request = create_request(engine, "beams", [5] * 30, BeamSearchParams(beam_width=4, max_tokens=6))
    engine.add_request(request)
    for _ in range(3):
        engine.step()
    tables = [beam.block_tables[0].block_ids for beam in request.groups[0].members]
    assert len(tables) == 4
    assert all(table[:7] == tables[0][:7] for table in tables)
    while engine.has_work:
        engine.step()
    assert engine.scheduler.kv_cache.pool.num_used_blocks == 0


def test_preempted_beams_go_on_where_they_were() -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=12)
    expected = search(fake_engine(num_blocks=200), [5, 6, 7, 8, 9], params)
    engine = fake_engine(num_blocks=12, block_size=4, max_model_len=40, max_num_batched_tokens=10, max_num_seqs=4)
    request = create_request(engine, "beams", [5, 6, 7, 8, 9], params, priority=1)
    engine.add_request(request)
    for _ in range(6):
        engine.step()
    urgent = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    engine.add_request(create_request(engine, "urgent", [9] * 30, urgent, priority=0))
    found = None
    while engine.has_work:
        for output in engine.step():
            found = output if output.request_id == "beams" else found
        check_integrity(engine.scheduler)
    assert request.num_preemptions == 1
    assert isinstance(found, OutputDelta)
    assert found.outputs == expected.outputs


def test_an_aborted_search_gives_everything_back() -> None:
    engine = fake_engine()
    engine.add_request(create_request(engine, "beams", [5, 6], BeamSearchParams(beam_width=3, max_tokens=12, n=2)))
    for _ in range(4):
        engine.step()
    output = engine.abort("beams")
    check_integrity(engine.scheduler)
    assert output is not None
    assert [(choice.index, choice.finish_reason) for choice in output.outputs] == [(0, "abort"), (1, "abort")]
    assert engine.scheduler.kv_cache.pool.num_used_blocks == 0
    assert not engine.has_work


def test_beams_of_the_text_have_no_end_token_in_it() -> None:
    output = search(tiny_engine(), [1, 5], BeamSearchParams(beam_width=2, max_tokens=3, n=1))
    (choice,) = output.outputs
    assert choice.text == "".join(f"t{token}" for token in choice.token_ids if token != EOS_ID)


def advance(group: SequenceGroup, *tops: dict[int, float]) -> Outcome:
    """One step: the most likely tokens after each beam, with their log-probabilities."""
    (consumer,), beams = group.consumers, group.members
    ids = np.array([list(top) for top in tops], np.int32)
    logprobs = np.array([list(top.values()) for top in tops], np.float32)
    none = np.zeros(len(tops), np.float32)
    output = StepOutput(ids[:, 0], none, ids[:, 0], ids, logprobs)
    outcome = consumer.consume([(RowUse(consumer, beam, 0, 1), row) for row, beam in enumerate(beams)], output)
    assert outcome.num_tokens == len(beams)
    return outcome


def test_the_best_candidates_go_on_and_finished_ones_do_not() -> None:
    engine = fake_engine()
    request = create_request(engine, "r", [5, 6], BeamSearchParams(beam_width=2, max_tokens=5))
    (group,) = request.groups
    end = min(request.eos_token_ids)
    outcome = advance(group, {end: -0.1, 7: -1.0, 8: -2.0})
    assert outcome.members is not None
    beams = [child for _, child in outcome.members]
    assert [beam.output_token_ids for beam in beams] == [[7], [8]]
    assert outcome.finish is None
    group.adopt(beams)
    outcome = advance(group, {end: -0.2, 9: -8.0, 10: -8.5}, {11: -7.5, 12: -8.0, 13: -9.0})
    assert outcome.finish is FinishReason.STOP  # two are finished, and -9 / 2 cannot win
    assert [result.output_token_ids for result in request.sequences] == [[end], [7, end]]
    assert [result.index for result in request.sequences] == [0, 1]
    assert {result.finish_reason for result in request.sequences} == {FinishReason.STOP}
