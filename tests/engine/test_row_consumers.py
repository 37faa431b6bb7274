"""The protocol of row consumers, by kinds that no request has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from octavo.engine.consumers.row_consumer import Outcome, RowConsumer, RowKind, RowUse
from octavo.engine.consumers.token_sampler import TokenSampler
from octavo.engine.engine import Engine
from octavo.engine.request import FinishReason, Sequence
from octavo.engine.schedule import Schedule, ScheduledSequence
from octavo.generation_request import PoolingParams
from octavo.sampling_params import SamplingParams
from tests.support.answers import Answers, whole
from tests.support.fake_executor import FakeExecutor, create_request, fake_engine, fake_logits
from tests.support.integrity import check_integrity

if TYPE_CHECKING:
    from octavo.batch import Batch, StepOutput

PROMPT = [5, 6, 7, 8]


class Doubler(RowConsumer):
    """Adds the token of its row twice, until the sequence has six new ones."""

    kind = RowKind.SAMPLE

    def consume(self, uses: list[tuple[RowUse, int]], output: StepOutput) -> Outcome:
        ((use, row),) = uses
        is_last = use.sequence.num_output_tokens == 4
        return Outcome([[int(output.token_ids[row])] * 2], 2, FinishReason.STOP if is_last else None)


def test_a_consumer_returns_an_outcome_that_the_engine_carries_out() -> None:
    engine = fake_engine()
    request = create_request(engine, "r", PROMPT, SamplingParams(max_tokens=20, ignore_eos=True, seed=1))
    request.groups[0].consumers = (Doubler(),)
    engine.add_request(request)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
        check_integrity(engine.scheduler)
    last = whole(outputs)
    tokens, reason = last.outputs[0].token_ids, last.outputs[0].finish_reason
    assert (len(tokens), reason) == (6, "stop")
    assert tokens[::2] == tokens[1::2]
    assert engine.metrics.num_generated_tokens_total == 6


class HiddenTap(RowConsumer):
    """Notes the hidden state of every token, while another consumer samples from the same tokens' logits."""

    kind = RowKind.HIDDEN

    def __init__(self) -> None:
        self.seen: list[np.ndarray] = []

    def wanted(self, sequence: Sequence) -> tuple[int, int]:
        return len(self.seen), len(sequence.token_ids)

    def consume(self, uses: list[tuple[RowUse, int]], output: StepOutput) -> Outcome:
        ((use, row),) = uses
        assert output.hidden_states is not None
        self.seen += list(output.hidden_states[row : row + use.count])
        return Outcome([])


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_tap_of_hidden_states_beside_sampled_tokens(max_in_flight: int) -> None:
    """Beside a plain sequence and a text, all in the same steps."""
    prompt, params = list(range(5, 25)), SamplingParams(max_tokens=12, ignore_eos=True, seed=3)
    expected = fake_engine()
    expected.add_request(create_request(expected, "r", prompt, params))
    tokens = finished(expected)["r"].outputs[0].token_ids  # type: ignore[union-attr]
    engine = fake_engine()
    executor = engine.executor
    assert isinstance(executor, FakeExecutor)
    executor.max_in_flight, executor.is_deferred = max_in_flight, max_in_flight > 1
    tap = HiddenTap()
    request = create_request(engine, "r", prompt, params)
    request.groups[0].consumers = (tap, *request.groups[0].consumers)
    engine.add_request(request)
    engine.add_request(create_request(engine, "other", PROMPT, params))
    engine.add_request(create_request(engine, "text", prompt, PoolingParams(pooling="mean")))
    outputs = finished(engine)
    assert outputs["r"].outputs[0].token_ids == tokens  # type: ignore[union-attr]
    texts = [prompt + tokens[:count] for count in range(12)]
    states = [fake_logits(prompt[: i + 1]) for i in range(19)] + [fake_logits(text) for text in texts]
    np.testing.assert_array_equal(tap.seen, states)
    vector = np.mean([fake_logits(prompt[: i + 1]) for i in range(20)], axis=0, dtype=np.float64)
    np.testing.assert_allclose(outputs["text"].vector, vector, rtol=1e-6)  # type: ignore[union-attr]
    assert executor.num_steps < 12 + 20


def finished(engine: Engine) -> Answers:
    """The answers, of a loop that overlaps steps."""
    outputs = Answers()
    while engine.has_work:
        engine.start()
        outputs.take(engine.publish())
        engine.prepare()
        engine.finish()
    return outputs


def test_a_text_waits_behind_answers_of_its_priority_and_shares_their_steps() -> None:
    engine = fake_engine(max_num_seqs=2, max_num_batched_tokens=8)
    sizes: list[tuple[int, int]] = []
    compute = engine.executor.compute  # type: ignore[attr-defined]

    def note(batch: Batch) -> StepOutput:
        sizes.append((len(batch.logits_indices), len(batch.hidden_indices)))
        return compute(batch)

    engine.executor.compute = note  # type: ignore[attr-defined]
    order: list[str] = []
    for i in range(3):
        engine.add_request(create_request(engine, f"text{i}", PROMPT, PoolingParams(pooling="last")))
    engine.add_request(create_request(engine, "answer", PROMPT, SamplingParams(max_tokens=3, ignore_eos=True)))
    assert (engine.metrics.num_embedding_waiting, engine.metrics.num_waiting) == (0, 0)  # as of the last step
    while engine.has_work:
        order += [output.request_id for output in engine.step() if getattr(output, "finished", True)]
        check_integrity(engine.scheduler)
        if len(sizes) == 1:
            assert (engine.metrics.num_embedding_waiting, engine.metrics.num_waiting) == (2, 0)
    assert order == ["text0", "text1", "answer", "text2"]
    assert sizes == [(1, 1), (1, 1), (1, 1)]


def test_texts_get_on_while_answers_never_cease_to_wait() -> None:
    engine = fake_engine(max_num_seqs=2, max_num_batched_tokens=8)
    answer, order = SamplingParams(max_tokens=2, ignore_eos=True), list[str]()
    for i in range(12):
        engine.add_request(create_request(engine, f"answer{i}", PROMPT, answer))
    for i in range(3):
        engine.add_request(create_request(engine, f"text{i}", PROMPT, PoolingParams(pooling="last")))
    count = 12
    while len(order) < 40:
        order += [output.request_id for output in engine.step() if getattr(output, "finished", True)]
        while engine.metrics.num_waiting < 6:
            engine.add_request(create_request(engine, f"answer{count}", PROMPT, answer))
            engine.metrics.num_waiting += 1
            count += 1
    texts = [i for i, request_id in enumerate(order) if request_id.startswith("text")]
    assert [order[i] for i in texts] == ["text0", "text1", "text2"]
    assert all(6 <= i - before <= 12 for before, i in zip([0, *texts], texts, strict=False))
    # Many texts that came first do not keep an answer waiting: at most those that are admitted already.
    for i in range(30):
        engine.add_request(create_request(engine, f"bulk{i}", PROMPT, PoolingParams(pooling="last")))
    rest: list[str] = []
    while len(rest) < count - 40:
        rest += [output.request_id for output in engine.step() if getattr(output, "finished", True)]
    engine.add_request(create_request(engine, "late", PROMPT, answer))
    rest.clear()
    while "late" not in rest:
        rest += [output.request_id for output in engine.step() if getattr(output, "finished", True)]
    assert len(rest) <= 5


def test_rows_come_in_the_order_of_the_output_with_their_tokens() -> None:
    engine = fake_engine()
    first, second = (
        create_request(engine, name, PROMPT, SamplingParams(max_tokens=1)).sequences[0] for name in ("a", "b")
    )
    sampler = TokenSampler()

    def use(sequence: Sequence, start: int, count: int) -> RowUse:
        return RowUse(sampler, sequence, start, count)

    uses = [use(first, 0, 3), use(first, 3, 1), use(second, 2, 2)]
    step = Schedule(16, 16, 8)
    step.add(ScheduledSequence(first, 0, 4, uses[:2]))
    step.add(ScheduledSequence(second, 1, 3, uses[2:]))
    assert list(step.rows()) == [(uses[0], 0, 0), (uses[1], 3, 3), (uses[2], 4, 5)]
