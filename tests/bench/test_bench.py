"""The benchmarks: that they measure what they say, on the fake model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.bench import (
    DEFINITIONS,
    LatencyReport,
    Spread,
    ThroughputReport,
    latency,
    requests,
    speculation,
    speculation_texts,
    throughput,
)
from octavo.engine.session import Session
from octavo.engine.speculation.policy import DraftPolicy
from octavo.errors import UsageError
from tests.support.drafting import AnyPolicy
from tests.support.fake_model import use_fake_model
from tests.support.text_models import save_decoder


def test_a_spread_is_the_middle_of_the_values() -> None:
    assert Spread.of([5.0]) == Spread(5.0, 5.0, 5.0, 1)
    spread = Spread.of([float(i) for i in range(11)])
    assert (spread.median, spread.low, spread.high, spread.num_values) == (5.0, 1.0, 9.0, 11)


def test_latency_runs_the_batches_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = use_fake_model(monkeypatch)
    report = latency("fake", input_len=10, output_len=5, batch_size=3, iterations=2, warmup=1)
    assert executor.num_tokens == 3 * 3 * (10 + 4)
    assert executor.is_closed
    assert report.time_to_first_token_s.num_values == 6
    assert report.end_to_end_s.num_values == 2
    assert report.time_per_output_token_s is not None
    assert report.end_to_end_s.median > report.time_to_first_token_s.low > 0
    assert report.output_tokens_per_s.num_values == 2
    assert json.loads(json.dumps(dataclasses.asdict(report)))["machine"]["model"] == "fake"


def test_the_speed_of_one_run_is_its_tokens_over_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_model(monkeypatch)
    report = latency("fake", input_len=10, output_len=5, batch_size=3, iterations=1, warmup=0)
    assert report.output_tokens_per_s.median == pytest.approx(15 / report.end_to_end_s.median)


def test_throughput_counts_tokens_and_waste(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_model(monkeypatch)
    report = throughput("fake", num_prompts=12, input_len=10, output_len=4, iterations=2)
    assert report.end_to_end_s.num_values == 2
    assert report.total_tokens_per_s.median == pytest.approx(report.output_tokens_per_s.median * 14 / 4)
    assert report.requests_per_s.median == pytest.approx(report.output_tokens_per_s.median / 4)
    assert 0 < report.kv_waste < 0.5
    json.dumps(dataclasses.asdict(report))


def test_warm_ups_are_not_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_model(monkeypatch)
    sizes: list[int] = []

    original = requests.run_once

    def run_once(session: Session, num_requests: int, *arguments: Any) -> requests.Run:
        run = original(session, num_requests, *arguments)
        sizes.append(num_requests)
        if len(sizes) <= 2:  # as if the warm-ups had wasted everything
            metrics = session.metrics
            metrics.num_wasted_slots_total += 10**6
            metrics.num_allocated_slots_total += 10**6
            metrics.num_preemptions_total += 5
        return run

    monkeypatch.setattr(requests, "run_once", run_once)
    report = throughput("fake", num_prompts=12, input_len=10, output_len=4, iterations=2, warmup=2)
    assert sizes == [8, 8, 12, 12]
    assert 0 < report.kv_waste < 0.5
    assert report.num_preemptions == 0


def test_every_measured_field_is_defined() -> None:
    for report in (LatencyReport, ThroughputReport):
        for field in dataclasses.fields(report):
            if "Spread" in str(field.type):
                assert field.name in DEFINITIONS, field.name


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"input_len": 0}, "input_len is 0; it must be an integer of at least 1"),
        ({"iterations": -1}, "iterations is -1"),
        ({"batch_size": True}, "batch_size is True"),
        ({"input_len": 60, "output_len": 10}, "add up to 70 tokens; the context has 64"),
    ],
)
def test_impossible_sizes_are_refused(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], message: str) -> None:
    use_fake_model(monkeypatch)
    with pytest.raises(UsageError, match=message):
        latency("fake", **sizes)


@pytest.mark.parametrize("users", [1, 8])
def test_speculation_compares_answers_with_drafts_and_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, users: int
) -> None:
    for kind in speculation_texts.PROMPTS:
        monkeypatch.setitem(speculation_texts.PROMPTS, kind, f"the quick brown fox and {kind} " * 2)
    monkeypatch.setattr(DraftPolicy, "lengths", AnyPolicy(1, least=1).lengths)
    model = str(save_decoder(tmp_path / "decoder"))
    report = speculation(model, turns=1, output_len=60, users=users, max_model_len=200, num_threads=1)
    assert report.are_equal
    assert [each.kind for each in report.kinds] == list(speculation_texts.PROMPTS)
    assert any((each.accepted_share or 0) > 0.1 and each.tokens_per_step > 1.1 for each in report.kinds)
    assert report.worst_gain == min(each.gain for each in report.kinds) <= report.gain
    with pytest.raises(UsageError, match="nothing can be compared"):
        speculation(model, turns=1, speculation="off")


def test_speculation_of_answers_of_one_token_gains_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for kind in speculation_texts.PROMPTS:
        monkeypatch.setitem(speculation_texts.PROMPTS, kind, kind)
    model = str(save_decoder(tmp_path / "decoder"))
    report = speculation(model, turns=1, output_len=1, users=8, num_threads=1)
    assert (report.gain, report.edit_gain, report.worst_gain) == (1.0, 1.0, 1.0)
    some = speculation(model, turns=1, output_len=1, kinds=["plan", "summary", "plan"], num_threads=1)
    assert [each.kind for each in some.kinds] == ["plan", "summary"]
    assert some.edit_gain is None
    with pytest.raises(UsageError, match="there is no kind of text 'poem'; choose rename in a file, types in a file"):
        speculation(model, kinds=["poem"])
