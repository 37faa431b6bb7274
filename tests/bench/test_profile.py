"""The profile of a step: every operation is there, and together they are the step."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path

import pytest

from octavo.backends.cpu import ceilings
from octavo.bench import ProfileReport, profile
from octavo.errors import UsageError
from tests.quantization.test_mixtures import save_tokenizer
from tests.support import tiny_models
from tests.support.fake_model import use_fake_model
from tests.support.tiny_hybrids import HYBRIDS


@pytest.fixture(scope="module")
def report() -> ProfileReport:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ceilings, "ROUNDS", 3)
        patch.setattr(ceilings, "_SHORT_ROUNDS", 10)
        patch.setattr(ceilings, "_BEYOND_CACHES", 32 << 20)
        return profile("smollm2", (1, 3), (64,), context=40, iterations=12, kv_cache_memory="64MiB", num_threads=2)


def test_operations_add_up_to_the_wall_time(report: ProfileReport) -> None:
    for step in report.steps:  # the rest is what handing a batch over takes, more on a busy machine
        assert 0.4 * step.seconds < step.operation_seconds <= step.seconds, step.name


def test_steps_are_what_was_asked_for(report: ProfileReport) -> None:
    assert [(step.name, step.num_rows, step.context) for step in report.steps] == [
        ("decode, 1 row", 1, 40),
        ("decode, 3 rows", 3, 40),
        ("prefill, 64 tokens", 64, 64),
    ]


def test_every_operation_has_time_and_cost(report: ProfileReport) -> None:
    for step in report.steps:
        assert step.operations[-1].kernel == "sample"
        for operation in step.operations:
            assert operation.seconds > 0, operation.label
            assert operation.bytes_moved > 0, operation.label
            assert operation.least_seconds > 0, operation.label
            assert 0 <= operation.waiting_seconds <= 2 * operation.seconds, operation.label
    one, three, _ = report.steps
    weights = sum(o.bytes_moved for o in one.operations)
    assert report.weight_bytes < weights * 1.5
    assert sum(o.flops for o in three.operations) > 2.9 * sum(o.flops for o in one.operations)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_model_with_states(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sequence has a slot of its own."""
    monkeypatch.setattr(ceilings, "_BEYOND_CACHES", 1 << 20)
    monkeypatch.setattr(ceilings, "ROUNDS", 2)
    monkeypatch.setattr(ceilings, "_SHORT_ROUNDS", 2)
    tiny_models.save_safetensors(tiny_models.tiny_model(name), tmp_path)
    save_tokenizer(tmp_path)
    report = profile(str(tmp_path), (1, 3), (8,), context=12, iterations=4, kv_cache_memory="8MiB", num_threads=1)
    assert [step.num_rows for step in report.steps] == [1, 3, 8]


def test_kinds_sum_the_layers_and_the_largest_loss_is_first(report: ProfileReport) -> None:
    step = report.steps[0]
    kinds = step.by_kind()
    assert sum(kind.count for kind in kinds) == len(step.operations)
    assert sum(kind.seconds for kind in kinds) == pytest.approx(step.operation_seconds)
    lost = [kind.seconds - kind.least_seconds for kind in kinds]
    assert lost == sorted(lost, reverse=True)
    assert {kind.label: kind.count for kind in kinds}["fused_linear gate+up"] == 30


def test_a_report_is_json(report: ProfileReport) -> None:
    loaded = json.loads(json.dumps(dataclasses.asdict(report)))
    assert loaded["steps"][0]["operations"][0]["kernel"] == "embedding"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"rows": (0,)}, r"rows\[0\] is 0; it must be an integer of at least 1"),
        ({"prefill": (-3,)}, r"prefill\[0\] is -3"),
        ({"rows": (2,), "prefill": (9000,)}, "2 sequences of 9000 tokens do not fit the context of 8192"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        profile("smollm2", **sizes)


def test_other_backends_have_no_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = use_fake_model(monkeypatch)
    module = importlib.import_module("octavo.bench.profile")
    monkeypatch.setattr(module, "load_engine", importlib.import_module("octavo.engine.session").load_engine)
    with pytest.raises(UsageError, match="only one process on the cpu backend can be profiled; leave out --backend"):
        profile("fake", (1,), (8,), context=8)
    assert executor.is_closed
