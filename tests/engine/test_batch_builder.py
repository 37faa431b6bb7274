"""The arrays of a step, checked against what they mean."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.batch import Batch
from octavo.engine.engine import Engine
from octavo.engine.request import Request
from octavo.engine.schedule import Schedule
from octavo.sampling_params import SamplingParams
from tests.support.fake_executor import EOS_ID, FakeExecutor, create_request, fake_engine


class Recorder(FakeExecutor):
    """Keeps the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Batch] = []

    def compute(self, batch: Batch):  # type: ignore[no-untyped-def]
        self.batches.append(batch)
        return super().compute(batch)


@pytest.fixture
def engine() -> Engine:
    engine = fake_engine(max_num_batched_tokens=16, enable_prefix_caching=False)
    recorder = Recorder()
    recorder.allocate_cache(64, 4)
    engine.executor = recorder
    return engine


def batches(engine: Engine) -> list[Batch]:
    executor = engine.executor
    assert isinstance(executor, Recorder)
    return executor.batches


def add(engine: Engine, name: str, prompt: list[int], **params: object) -> Request:
    request = create_request(engine, name, prompt, SamplingParams(**{"ignore_eos": True, **params}))  # type: ignore[arg-type]
    engine.add_request(request)
    return request


def test_a_step_of_decode_and_prefill_together(engine: Engine) -> None:
    first = add(engine, "first", [10, 11, 12, 13, 14], temperature=0)
    engine.step()
    second = add(engine, "second", list(range(20, 40)), temperature=0.5, top_k=7, seed=9)
    engine.step()
    batch = batches(engine)[1]
    tables = [request.sequences[0].block_tables[0].block_ids for request in (first, second)]
    assert batch.token_ids.tolist() == [first.sequences[0].token_ids[5], *range(20, 35)]
    assert batch.positions.tolist() == [5, *range(15)]
    assert batch.query_start_loc.tolist() == [0, 1, 16]
    assert batch.seq_lens.tolist() == [6, 15]
    for row, table in enumerate(tables):
        assert batch.block_tables[0, row, : len(table)].tolist() == table
    expected = [tables[0][1] * 4 + 1, *(tables[1][i // 4] * 4 + i % 4 for i in range(15))]
    assert batch.slot_mapping[0].tolist() == expected
    assert batch.logits_indices.tolist() == [0]  # the second prompt is not complete yet
    engine.step()
    sampling = batches(engine)[2].sampling
    assert sampling is not None
    assert batches(engine)[2].logits_indices.tolist() == [0, 5]
    assert sampling.rows["temperature"].tolist() == [0.0, 0.5]
    assert sampling.rows["top_k"].tolist() == [0, 7]
    assert sampling.rows["seed"].tolist()[1] == 9
    assert sampling.rows["counter"].tolist() == [2, 0]
    assert sampling.rows["target"].tolist() == [-1, -1]
    assert sampling.rows["num_logprobs"].tolist() == [-1, -1]
    assert sampling.allowed_mask is None


def test_rows_of_prompt_logprobs_come_before_the_sampled_one(engine: Engine) -> None:
    add(engine, "r", [5, 6, 7, 8], prompt_logprobs=2, logprobs=1)
    engine.step()
    batch = batches(engine)[0]
    assert batch.logits_indices.tolist() == [0, 1, 2, 3]
    assert batch.sampling is not None
    assert batch.sampling.rows["target"].tolist() == [6, 7, 8, -1]
    assert batch.sampling.rows["num_logprobs"].tolist() == [2, 2, 2, 1]


def test_histories_biases_and_masks_belong_to_their_rows(engine: Engine) -> None:
    add(engine, "plain", [5])
    penalized = add(engine, "penalized", [6, 6, 7], presence_penalty=1.0, seed=1, max_tokens=8)
    biased = add(
        engine, "biased", [8], logit_bias={3: 1.5}, min_tokens=2, ignore_eos=False, allowed_token_ids=[3, 4, 40]
    )
    for _ in range(3):
        engine.step()
    sampling = batches(engine)[2].sampling
    assert sampling is not None
    assert sampling.history_start[1] == 0
    generated = penalized.sequences[0].output_token_ids[:2]
    seen = dict(zip(sampling.history_ids.tolist(), sampling.history_counts.tolist(), strict=True))
    assert seen == {token: generated.count(token) for token in [6, 7, *generated]}
    assert sampling.history_start.tolist() == [0, 0, len(seen), len(seen)]
    assert sampling.bias_start.tolist() == [0, 0, 0, 1]  # both of its tokens are there: the end is allowed now
    assert dict(zip(sampling.bias_ids.tolist(), sampling.bias_values.tolist(), strict=True)) == {3: 1.5}
    assert EOS_ID in biased.eos_token_ids
    first = batches(engine)[0].sampling
    assert first is not None
    assert dict(zip(first.bias_ids.tolist(), first.bias_values.tolist(), strict=True)) == {3: 1.5, EOS_ID: -np.inf}
    assert sampling.allowed_mask is not None
    assert sampling.allowed_mask.tolist() == [[2**32 - 1] * 2, [2**32 - 1] * 2, [0b11000, 1 << 8]]


def test_a_row_that_changes_hands_gets_new_parameters(engine: Engine) -> None:
    add(engine, "first", [5], temperature=1.5, seed=3, max_tokens=1)
    engine.step()
    add(engine, "second", [6], temperature=0.25, seed=4, max_tokens=1)
    engine.step()
    seen = [
        (batch.sampling.rows["temperature"][0], batch.sampling.rows["seed"][0])
        for batch in batches(engine)
        if batch.sampling
    ]
    assert seen == [(1.5, 3), (0.25, 4)]


def test_what_stays_the_same_is_kept_from_step_to_step(engine: Engine) -> None:
    """Arrays of sampling are reused while the same sequences go on, and made anew as soon as they are not the same."""
    add(engine, "a", [10, 11], temperature=0.5, seed=1, max_tokens=3)
    add(engine, "b", [20, 21], temperature=0.75, seed=2, max_tokens=8)
    for _ in range(4):
        engine.step()
    add(engine, "c", [30, 31], temperature=1.0, seed=3, presence_penalty=1.0)
    engine.step()
    engine.step()
    samplings = [batch.sampling for batch in batches(engine)]
    temperatures = [*[[0.5, 0.75]] * 3, [0.75], *[[0.75, 1.0]] * 2]
    assert [s.rows["temperature"].tolist() for s in samplings if s is not None] == temperatures
    assert [s.rows["counter"].tolist() for s in samplings if s is not None] == [
        [0, 0],
        [1, 1],
        [2, 2],
        [3],
        [4, 0],
        [5, 1],
    ]
    assert [s.rows["seed"].tolist() for s in samplings if s is not None] == [*[[1, 2]] * 3, [2], *[[2, 3]] * 2]
    first, second, third, *_, last = samplings
    assert first is not None
    assert second is not None
    assert third is not None
    assert last is not None
    assert first.history_start is second.history_start is third.history_start
    assert first.rows is not second.rows  # the step before may still be reading its own
    assert len(last.history_ids) == 3  # the penalty sees what the last step made


def test_a_step_made_from_the_one_before_is_as_if_it_were_made_anew(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where some of its sequences, or all, begin a block."""
    builder, compared = engine._batch_builder, []
    follow = builder.follow

    def compared_follow(batch: Batch, step: Schedule) -> Batch:
        found, expected = follow(batch, step), builder.build(step)
        for name in ("token_ids", "positions", "query_start_loc", "seq_lens", "slot_mapping", "logits_indices"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), name)
        np.testing.assert_array_equal(found.block_tables, expected.block_tables)
        assert found.sampling is not None
        assert expected.sampling is not None
        np.testing.assert_array_equal(found.sampling.rows, expected.sampling.rows)
        compared.append((found.positions % 4 == 0).sum())
        return found

    monkeypatch.setattr(builder, "follow", compared_follow)
    for name, prompt in (("a", [10, 11]), ("b", [20, 21, 22]), ("c", [30, 31])):
        add(engine, name, prompt, temperature=0.5, seed=1, max_tokens=12)
    while engine.has_work:
        engine.start()
        engine.publish()
        engine.prepare()
        engine.finish()
    assert {0, 1, 2} <= {int(count) for count in compared}
