"""The ceilings: figures that a machine can have, for what it has, and none for what it lacks."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from octavo.backends.cpu import _native, ceilings
from octavo.backends.cpu.ceilings import ReadBandwidth
from octavo.backends.profiling import Ceiling, Ceilings


@pytest.fixture(scope="module")
def measured(script: Callable[[str], ModuleType]) -> Ceilings:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ceilings, "_BEYOND_CACHES", 32 << 20)
        patch.setattr(ceilings, "ROUNDS", 6)
        patch.setattr(ceilings, "_SHORT_ROUNDS", 10)
        result: Ceilings = script("ceilings").measure_ceilings(_native.detected_isa(), 2)
        return result


def test_every_figure_is_plausible(measured: Ceilings) -> None:
    bounds = {"B/s": (1e7, 1e14), "1/s": (1e5, 1e15), "s": (0.0, 10.0)}
    for figure in measured.figures:
        if figure.value is not None:
            low, high = bounds[figure.unit]
            assert low <= figure.value <= high, figure


def test_nothing_is_made_up_for_what_the_machine_lacks(measured: Ceilings) -> None:
    known = _native.known_isas()
    lacking = set(known[known.index(_native.detected_isa()) + 1 :])
    assert {figure.isa for figure in measured.figures if figure.value is None} == lacking
    assert all(figure.value is None for figure in measured.figures if figure.isa in lacking)


def test_every_line_of_the_table_is_there_once(measured: Ceilings) -> None:
    keys = [(figure.name, figure.isa, figure.threads) for figure in measured.figures]
    assert len(keys) == len(set(keys))
    for name in ("read from memory", "read from L1", "read from L2", "int8 multiply-adds", "float multiply-adds"):
        assert {threads for n, _, threads in keys if n == name} == {1, 2}, name
    assert {name for name, _, _ in keys if "barrier" in name or "wake" in name} == {
        "barrier",
        "wake-up of a sleeping worker",
    }


def test_values_are_found_by_name(measured: Ceilings) -> None:
    assert measured.value("read from memory") > 0
    assert measured.value("int8 multiply-adds") > 0
    with pytest.raises(KeyError, match="tea"):
        measured.value("tea")


def test_vectors_multiply_faster_than_scalars(measured: Ceilings) -> None:
    if measured.isa == "scalar":
        pytest.skip("a machine with scalar kernels only")
    of_level = {f.isa: f.value for f in measured.figures if f.name == "float multiply-adds" and f.threads == 1}
    scalar, ours = of_level["scalar"], of_level[measured.isa]
    assert scalar is not None
    assert ours is not None
    assert ours > scalar


def test_the_better_of_two_measurements_counts() -> None:
    def of(rate: float, seconds: float) -> Ceilings:
        figures = (
            Ceiling("rate", "", 2, rate, "1/s"),
            Ceiling("time", "", 2, seconds, "s"),
            Ceiling("x", "", 2, None, "s"),
        )
        return Ceilings("avx2", 2, figures)

    assert of(3.0, 4.0).best_of(of(2.0, 1.0)) == of(3.0, 1.0)


def test_bandwidth_can_be_measured_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_BEYOND_CACHES", 8 << 20)
    bandwidth = ReadBandwidth(2)
    assert all(1e7 < bandwidth.measure() < 1e14 for _ in range(3))
