"""`octavo bench`: the figures arrive, with their definitions."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from octavo.backends.cpu import ceilings
from octavo.bench import KindReport, SpeculationReport
from octavo.bench.machine import Machine
from octavo.cli.bench import _write_speculation
from tests.support.processes import octavo, octavo_here


def test_latency(tiny: Path) -> None:
    sizes = ("--input-len", "8", "--output-len", "4", "--batch-size", "2", "--iterations", "3")
    report = json.loads(octavo("bench", "latency", tiny, *sizes, "--json").stdout)
    assert (report["input_len"], report["output_len"], report["batch_size"], report["iterations"]) == (8, 4, 2, 3)
    spread = report["end_to_end_s"]
    assert 0 < spread["low"] <= spread["median"] <= spread["high"]
    assert "median" in report["definitions"]["spread"]
    text = octavo_here("bench", "latency", tiny, *sizes).stdout
    for name in ("time_to_first_token_s", "time_per_output_token_s", "median", "from submitting a request"):
        assert name in text


def test_throughput(tiny: Path) -> None:
    sizes = ("--input-len", "8", "--output-len", "4", "--num-prompts", "6", "--iterations", "2")
    report = json.loads(octavo_here("bench", "throughput", tiny, *sizes, "--json", "--num-threads", "1").stdout)
    assert report["num_prompts"] == 6
    assert report["output_tokens_per_s"]["median"] > 0
    assert report["machine"]["num_threads"] == 1
    assert "kv_waste" in report["definitions"]
    assert "requests_per_s" in octavo_here("bench", "throughput", tiny, *sizes).stdout


def test_profile(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "ROUNDS", 3)
    monkeypatch.setattr(ceilings, "_SHORT_ROUNDS", 10)
    monkeypatch.setattr(ceilings, "_BEYOND_CACHES", 32 << 20)
    sizes = ("--rows", "1", "--rows", "2", "--prefill", "16", "--context", "16", "--iterations", "4")
    report = json.loads(octavo_here("bench", "profile", tiny, *sizes, "--json").stdout)
    assert [step["num_rows"] for step in report["steps"]] == [1, 2, 16]
    assert report["steps"][0]["ceilings"]["figures"][0]["name"] == "read from memory"
    text = octavo_here("bench", "--profile", tiny, "--rows", "2", *sizes[4:]).stdout
    for words in ("decode, 2 rows, context 16", "fused_attention", "wall time of the step", "% of it", "ceiling:"):
        assert words in text


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("latency", "MODEL", "--input-len", "0"), 2, "--input-len"),
        (("latency", "MODEL", "--input-len", "60", "--output-len", "60"), 2, "the context has 64"),
        (("throughput", "MODEL", "--num-prompts", "-1"), 2, "--num-prompts"),
        (("throughput", "/nowhere.gguf"), 3, "/nowhere.gguf"),
        (("speed",), 2, "No such command 'speed'"),
    ],
)
def test_mistakes_get_one_clear_line(tiny: Path, arguments: tuple[str, ...], code: int, words: str) -> None:
    result = octavo_here("bench", *(tiny if word == "MODEL" else word for word in arguments))
    assert result.returncode == code
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_speculation_shows_a_line_for_each_kind_of_text(capsys: pytest.CaptureFixture[str]) -> None:
    values: dict[str, object] = dict.fromkeys((each.name for each in dataclasses.fields(Machine)), "x")
    machine = Machine(**{**values, "weight_bytes": 1 << 20})  # type: ignore[arg-type]
    kinds = [
        KindReport("edits", 60, 0.72, 3.47, 46.6, 161.0, 3.45, 0.85),
        KindReport("talk", 50, None, 1.0, 50.0, 49.5, 0.99, 1.0),
    ]
    _write_speculation(SpeculationReport(machine, 8, 0.7, 3, kinds, 1.85, 3.45, 0.99, False))
    text = capsys.readouterr().out
    assert "8 users, temperature 0.7, 3 turns" in text
    assert re.search(r"edits +60 +72% +3.47 +46.6 +161.0 +3.45 +0.85\n", text)
    assert re.search(r"talk +50 +- +1.00 ", text)
    assert "edits 3.45, all 1.85 (geometric means), worst 0.99\nanswers with drafts are NOT the same\n" in text
    _write_speculation(SpeculationReport(machine, 1, 0.0, 3, kinds[1:], 0.99, None, 0.99, True))
    assert "\n\nall 0.99 (geometric means), worst 0.99\n" in capsys.readouterr().out
