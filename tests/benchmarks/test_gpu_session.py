"""The one command of a session with a GPU: its parts, what is done already, and the gain of threads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


def record(decode: float, prefill: float) -> str:
    measures = {"decode": {"median": decode}, "prefill-512": {"median": prefill}}
    engines = [{"engine": "octavo", "measures": measures}, {"engine": "llama_cpp", "measures": measures}]
    return json.dumps({"results": [{"engines": engines}]})


def test_the_parts_of_the_processor_share_three_minutes(script: Callable[[str], ModuleType], tmp_path: Path) -> None:
    session = script("gpu_session")
    options = session.arguments(["--folder", str(tmp_path), "--models", "a.gguf", "b.gguf", "--peer", "llama_cpp=py"])
    parts = session.parts_of(options, 16)
    assert [part.name for part in parts[:5]] == [f"a, {n} threads" for n in (1, 2, 4, 8, 16)]
    assert len(parts) == 10
    assert sum(part.needs_s for part in parts) == pytest.approx(180)
    assert parts[3].command[-6:] == [
        "--threads", "8", "--json", str(tmp_path / "cpu-a-8.json"), "--peer", "llama_cpp=py"
    ]  # fmt: skip
    assert "decode,prefill-512" in parts[3].command
    assert len(session.parts_of(options, 2)) == 4


def test_what_is_done_leaves_its_time_to_the_gpu(
    script: Callable[[str], ModuleType],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = script("gpu_session")
    monkeypatch.setattr(session.os, "cpu_count", lambda: 2)
    words = ["--folder", str(tmp_path), "--models", "a.gguf", "--list"]
    assert session.main(words) == 0
    assert capsys.readouterr().out.splitlines() == ["GPU cases: 360 s", "a, 1 threads: 90 s", "a, 2 threads: 90 s"]
    (tmp_path / "cpu-a-1.json").write_text(record(10, 100))
    assert session.main(words) == 0
    assert capsys.readouterr().out.splitlines()[:2] == ["GPU cases: 450 s", "a, 1 threads: 90 s (done)"]


def test_the_gain_of_threads(script: Callable[[str], ModuleType], tmp_path: Path) -> None:
    session = script("gpu_session")
    for count, decode, prefill in ((1, 10, 100), (2, 19, 200), (8, 60, 720)):
        (tmp_path / f"cpu-a-b-{count}.json").write_text(record(decode, prefill))
    assert session.scaling(tmp_path) == [
        "a-b, decode, gain of each thread: 1: 1.00, 2: 0.95, 8: 0.75 (too low at 8)",
        "a-b, prefill-512, gain of each thread: 1: 1.00, 2: 1.00, 8: 0.90",
    ]
