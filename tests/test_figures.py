"""Measured figures of the documentation are those of docs/figures, with the machine, commit and command of each."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools import make_chart as chart
from tools import make_figures as figures

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
# First two titles of the tables that hold no measured figures, on pages that have measured ones.
OTHER_TABLES = {
    "Format | A call",
    "`--peer` | reads",
    "checkpoint | vLLM's error",
    "event | behaviour",
    "family (`model_type`) | safetensors",
    "figure | definition",
    "form | example",
    "format | fields",
    "launcher | `--nnodes`",
    "level | frees",
    "line | trained on",
    "measure | definition",
    "option | default",
    "option | effect",
    "option | meaning",
    "protocol | forms",
    "provider | operations",
    "source | guesses",
    "source | the next step",
    "subject | machine that it needs",
    "target | input",
    "type | what it is",
    "what happens | when the step ends",
    "what | limit",
    "| on a GPU",
    "| why",
}
RECORD = {
    "machine": "two cores",
    "commit": "abc",
    "date": "2026-11-28",
    "command": "python x.py",
    "columns": ["rows", "kind", "ms"],
    "rows": [["1", "", "2.5"], ["", "", "**3**"]],
}
TABLE = """<!-- figures steps -->
| rows | kind | ms |
|---|---|---|
| 1 | | 2.5 |
| | | **3** |
<!-- end of figures -->
"""


def test_the_pages_follow_the_records() -> None:
    for page in figures.PAGES:
        text, measured = (ROOT / page).read_text(), figures.records(page)
        assert list(figures.problems(text, measured)) == [], page
        assert figures.rewritten(text, measured) == text, f"{page}: run python tools/make_figures.py"


def test_no_table_of_figures_is_written_by_hand() -> None:
    for page in figures.PAGES:
        if not any("rows" in record for record in figures.records(page).values()):
            continue
        rest = figures._TABLE.sub("", (ROOT / page).read_text())
        titles = re.findall(r"^\|([^|\n]*\|[^|\n]*)\|[^\n]*\n\|\s*---", rest, re.MULTILINE)
        assert {title.strip() for title in titles} <= OTHER_TABLES, page


@pytest.mark.parametrize("page", sorted({*figures.TEXTS} - {figures.GENERATED}))
def test_every_quantity_in_a_sentence_is_recorded_or_no_measurement(page: str) -> None:
    unmeasured = tomllib.loads(figures.UNMEASURED.read_text())
    text, measured = (ROOT / page).read_text(), figures.records(page)
    assert figures.unrecorded(page, text, measured, unmeasured.get(page, ())) == [], "see tools/make_figures.py"


def test_the_list_of_unmeasured_quantities_names_pages() -> None:
    assert set(tomllib.loads(figures.UNMEASURED.read_text())) <= set(figures.TEXTS)


@pytest.mark.parametrize(
    ("sentence", "found"),
    [
        ("It takes 3.5 ms.", ["3.5 ms"]),
        ("It makes 1,024 tokens a second, 12 % more.", ["1,024 tokens a second", "12 %"]),
        ("It takes 2.5 ms of 64 x 128 numbers in `--timeout 5s`, with torch 2.11.0.", []),
        ("A KL of 0.0123.", ["0.0123"]),
    ],
)
def test_the_quantities_of_a_sentence(sentence: str, found: list[str]) -> None:
    assert figures.unrecorded("docs/lab/x.md", f"{sentence}\n{TABLE}", {"steps": RECORD}, ["2.5 ms"]) == found


def test_a_sentence_explains_its_quantities_as_long_as_the_page_has_it() -> None:
    record = {key: RECORD[key] for key in figures.PROVENANCE} | {"statements": ["3.5 ms of 7 ms"]}
    assert figures.unrecorded("README.md", "It takes 3.5 ms\nof 7 ms, or 8 ms.", {"time": record}, ()) == ["8 ms"]
    assert list(figures.problems("It takes 3.5 ms\nof 7 ms.", {"time": record})) == []
    assert list(figures.problems("It takes 4 ms.", {"time": record})) == [
        "time: the page does not contain '3.5 ms of 7 ms'"
    ]


def test_the_results_show_medians_of_the_table_of_that_machine() -> None:
    shown = figures.records("docs/results.md")["readme"]
    whole = figures.records("docs/lab/performance.md")["zen3"]
    assert whole["machine"] == shown["machine"]
    assert whole["commit"] == shown["commit"]
    groups = [whole["rows"][at : at + 3] for at in range(0, len(whole["rows"]), 3)]
    medians = [[row[column].strip("*").split(" ")[0] for column in (2, 3) for row in group] for group in groups]
    assert [row[1:] for row in shown["rows"]] == medians


def test_the_results_show_figures_of_the_quality_page() -> None:
    whole, shown = figures.records("docs/lab/quality.md")["types_qwen_15b"], figures.records("docs/results.md")
    expected = [[row[0], row[3].split(" ")[0], f"{float(row[4]):.4f}", row[6], row[7]] for row in whole["rows"]]
    assert [[row[0], *row[2:]] for row in shown["quality_types"]["rows"]] == expected


def test_the_results_show_figures_of_the_gpu_page() -> None:
    cases = json.loads((ROOT / "docs/lab/performance_gpu.json").read_text())["cases"]
    found = {}
    for name in ("bf16", "I4_128_Z"):
        both = [*cases[f"{name}: decode"]["figures"], *cases[f"{name}: prompts"]["figures"]]
        found[name] = {figure["name"]: f"{figure['value']:,.0f}" for figure in both}
    wanted = ("batch 1", "batch 32", "batch 256", "prompt of 2048")
    rows = figures.records("docs/results.md")["gpu_decode"]["rows"]
    assert [row[1:] for row in rows] == [[each[name] for name in wanted] for each in found.values()]


def test_a_table_is_made_from_its_record() -> None:
    assert figures.rewritten(TABLE.replace("2.5", "7"), {"steps": RECORD}) == TABLE
    assert list(figures.problems(TABLE, {"steps": RECORD})) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda record: record | {"commit": ""}, "steps: commit is missing"),
        (lambda record: record | {"rows": [["1"]]}, "steps: a row has not 3 cells"),
    ],
)
def test_a_record_that_lacks_something(change: Callable[[dict[str, Any]], dict[str, Any]], reason: str) -> None:
    assert list(figures.problems(TABLE, {"steps": change(RECORD)})) == [reason]


def test_a_table_and_a_record_need_each_other() -> None:
    assert list(figures.problems(TABLE, {})) == ["steps: nothing is recorded"]
    assert list(figures.problems("", {"steps": RECORD})) == ["steps: there is no such table"]
    assert list(figures.problems(TABLE * 2, {"steps": RECORD})) == ["steps: two tables have this name"]


def test_the_chart_follows_the_records() -> None:
    record = figures.records("docs/lab/performance.md")[chart.TABLE]
    assert chart.CHART.read_text() == chart.draw(record), "run python tools/make_chart.py"
    assert ("Qwen2.5-1.5B, prefill of 512", {"llama.cpp": 1.73, "vLLM": 1.38}) in chart.ratios(record)
