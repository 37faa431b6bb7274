"""The protocol of row consumers, by kinds that no request has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.engine.consumers.row_consumer import Outcome, RowConsumer, RowKind, RowUse
from octavo.engine.consumers.token_sampler import TokenSampler
from octavo.engine.request import FinishReason, Sequence
from octavo.engine.schedule import Schedule, ScheduledSequence
from octavo.sampling_params import SamplingParams
from tests.support.answers import whole
from tests.support.fake_executor import create_request, fake_engine
from tests.support.integrity import check_integrity

if TYPE_CHECKING:
    from octavo.batch import StepOutput

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
