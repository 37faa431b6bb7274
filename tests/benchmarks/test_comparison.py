"""Ratios, table and JSON of a comparison, from made-up figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

BANDWIDTH = {"median": 30e9, "min": 20e9, "max": 35e9}


@pytest.fixture
def comparison(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("comparison")


def both(comparison: ModuleType) -> tuple[Any, Any]:
    ours = comparison.Figures("octavo", "octavo 1 (avx2)", 10**9)
    theirs = comparison.Figures("llama.cpp", "1", 10**9)
    for ours_now, theirs_now in ((20.0, 10.0), (24.0, 16.0), (30.0, 12.0)):
        ours.add({"decode": ours_now, "start": 1 / ours_now})
        theirs.add({"decode": theirs_now, "start": 1 / theirs_now})
    return ours, theirs


def test_a_ratio_is_that_of_the_medians_and_its_range_that_of_the_turns(comparison: ModuleType) -> None:
    measure = comparison.MEASURES["decode"]
    value = comparison.ratio([20.0, 24.0, 30.0], [10.0, 16.0, 12.0], measure)
    assert value == {"of_medians": 2.0, "median": 2.0, "min": 1.5, "max": 2.5}
    assert comparison.shown_ratio(value) == "**2.00x** (1.50 to 2.50)"


def test_less_is_better_where_it_is_time(comparison: ModuleType) -> None:
    value = comparison.ratio([0.5, 1.0], [2.0, 3.0], comparison.MEASURES["start"])
    assert (value["of_medians"], value["min"], value["max"]) == (pytest.approx(2.5 / 0.75), 3.0, 4.0)


def test_turns_that_are_missing_are_no_ratio(comparison: ModuleType) -> None:
    with pytest.raises(ValueError, match="zip"):
        comparison.ratio([1.0, 2.0], [1.0], comparison.MEASURES["decode"])


def test_json_has_every_turn_the_ratio_and_the_share_of_the_ceiling(comparison: ModuleType) -> None:
    ours, theirs = both(comparison)
    lines = [json.loads(json.dumps(comparison.engine_json(figures, ours, BANDWIDTH))) for figures in (ours, theirs)]
    assert lines[0].keys() == lines[1].keys()
    assert "ratio" not in lines[0]["measures"]["decode"]
    decode = lines[1]["measures"]["decode"]
    assert decode["values"] == [10.0, 16.0, 12.0]
    assert (decode["median"], decode["unit"]) == (12.0, "tokens/s")
    assert decode["ratio"]["of_medians"] == 2.0
    assert decode["share_of_bandwidth"] == pytest.approx(12 / 30)
    assert lines[1]["measures"]["start"]["ratio"]["of_medians"] == pytest.approx(2.0)


def test_without_octavo_there_are_figures_and_no_ratios(comparison: ModuleType) -> None:
    _, theirs = both(comparison)
    assert "ratio" not in comparison.engine_json(theirs, None, BANDWIDTH)["measures"]["decode"]


def test_an_engine_that_fails_once_has_a_reason_and_no_figure(comparison: ModuleType) -> None:
    ours, theirs = both(comparison)
    theirs.drop(("decode",), "llama.cpp: MemoryError")
    line = comparison.engine_json(theirs, ours, BANDWIDTH)
    assert set(line["measures"]) == {"start"}
    assert line["left_out"] == {"decode": "llama.cpp: MemoryError"}


def test_the_table_has_a_row_a_measure_and_leaves_cells_without_figures_empty(comparison: ModuleType) -> None:
    ours, theirs = both(comparison)
    ours.add({"prefix": 20.0})
    columns, rows = comparison.table_rows([comparison.engine_json(each, ours, BANDWIDTH) for each in (ours, theirs)])
    assert list(columns) == ["measure", "octavo", "llama.cpp", "octavo / llama.cpp"]
    assert [row["measure"].split(",")[0] for row in rows] == [
        "decode",
        "prefix cache: first token 1",
        "process start to first token",
    ]
    assert rows[0]["octavo"] == "24.0 (20.0 to 30.0), 80% of bandwidth"
    assert rows[0]["ratio llama.cpp"] == "**2.00x** (1.50 to 2.50)"
    assert "llama.cpp" not in rows[1]
    assert rows[1]["octavo"] == "20.0"
