"""The bars of speculation: what each is read from, when it is met, and the record of their table."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from octavo.bench.speculation_texts import PROMPTS
from tools import make_figures

GAINS = {
    "rename in a file": 3.0,
    "types in a file": 2.2,
    "code and tests": 1.5,
    "a script": 1.2,
    "summary": 1.4,
    "JSON of a text": 1.0,
    "explanation": 1.1,
    "plan": 1.3,
}


@pytest.fixture
def bars(script: Callable[[str], ModuleType]) -> Any:
    """`benchmarks/speculation_bars.py`."""
    return script("speculation_bars")


def report(gains: Mapping[str, float] = GAINS, **changes: Any) -> dict[str, Any]:
    kinds = [{"kind": kind, "gain": gain, "first_token_ratio": 1.01} for kind, gain in gains.items()]
    return {"kinds": kinds, "gain": 1.48, "worst_gain": min(gains.values()), "are_equal": True, **changes}


def rows(bars: Any, reports: Mapping[str, Any]) -> dict[str, tuple[float, str]]:
    return {row["what"]: (row["value"], row["met"]) for _, row in bars.judged(reports)}


def test_every_kind_and_measurement_is_there(bars: Any) -> None:
    assert {*bars.CODE, *bars.CHAT, *bars.PEER_KINDS} < set(PROMPTS) == set(GAINS)
    assert {each.measurement for each in bars.BARS} == {*bars.MEASUREMENTS, "peer"}


def test_bars_are_met_by_the_figures_of_their_kinds(bars: Any) -> None:
    found = rows(bars, {"ngram": report(), "model": report(), "peer": {"kinds": [], "mean": 1.19}})
    assert found["n-grams, edits of a file"] == (2.569, "yes")
    assert found["n-grams, the worst of eight kinds"] == (1.0, "yes")
    assert found["0.5B drafts, code"] == (1.342, "yes")
    assert found["0.5B drafts, time to the first token"] == (1.01, "yes")
    assert found["tokens/s over llama.cpp's with its own speculation"] == (1.19, "NO")
    assert "n-grams, 8 users" not in found


def test_no_gain_counts_with_other_answers(bars: Any) -> None:
    assert {met for _, met in rows(bars, {"ngram": report(are_equal=False)}).values()} == {"NO: other answers"}


def test_the_record_makes_a_table_of_the_documentation(bars: Any) -> None:
    record = bars.table_of({"ngram": report(), "users": report({"plan": 1.0})})
    assert list(make_figures.problems("<!-- figures bars -->\n<!-- end of figures -->\n", {"bars": record})) == []
    assert [row[:3] for row in record["rows"]][-1] == ["n-grams, 8 users", "at least 0.99", "1.48"]
    kinds = [row[3] for row in record["rows"]]
    assert kinds[0].startswith("rename in a file 3.00, types in a file 2.20")
    assert kinds[1] == ""  # shown once for each measurement
    shown = make_figures.records("docs/speculation.md")["bars"]
    assert (shown["columns"], shown["command"]) == (record["columns"], record["command"])
    assert [row[:2] for row in shown["rows"]] == [[each.what, bars.limit_of(each)] for each in bars.BARS[:-1]]


def test_a_run_measures_writes_and_judges(bars: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        asked.append((command, options["env"].get("OCTAVO_ISA")))
        return subprocess.CompletedProcess(command, 0, json.dumps(report(worst_gain=0.9)))

    monkeypatch.delenv("OCTAVO_ISA", raising=False)
    found = {"processor": "a CPU", "family": "25/1", "extensions": ["avx2"], "cores": 2}
    for module in (bars, sys.modules[bars.measurement.__module__]):
        monkeypatch.setattr(module, "machine", lambda: found)
        monkeypatch.setattr(module, "commit", lambda: "abc")
    monkeypatch.setattr(bars.subprocess, "run", run)
    file = tmp_path / "speculation.json"
    file.write_text('{"steps": {}}')
    monkeypatch.setattr(sys, "argv", ["bars", "large.gguf", "small.gguf", "--json", str(file)])
    assert bars.main() == 1  # one kind is slower
    assert [isa for _, isa in asked] == [None] * 4 + ["avx2"]
    assert ["small.gguf" in command for command, _ in asked] == [False, True, True, False, False]
    assert asked[-1][0][-4:] == ["--kind", "rename in a file", "--kind", "types in a file"]
    assert json.loads(file.read_text())["steps"] == {}, "the other figures of the page stay"
    written = json.loads(file.read_text())["bars"]
    assert written["machine"] == "a CPU, family 25/1 (avx2), 2 cores"
    assert len(written["rows"]) == 9
