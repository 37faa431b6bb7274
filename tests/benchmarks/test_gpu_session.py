"""The one command of a session with a GPU: its parts, what is done already, and the gain of threads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

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


def test_a_whole_session_with_a_faked_device(
    script: Callable[[str], ModuleType],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both programs start with words that they know, each case and part runs once, and every target has a figure."""
    torch = pytest.importorskip("torch")
    session, gpu, cases, report, compare = map(script, ("gpu_session", "gpu", "gpu_cases", "gpu_report", "compare"))
    real, ran = subprocess.run, []

    def figures(case: Any) -> list[Any]:
        ran.append(case.name)
        wanted = [target for target in report.TARGETS if target.case == case.name]
        return [cases.Figure(t.figure, t.must, t.unit, t.must) for t in wanted] or [cases.Figure("time", 1.0, "s")]

    listed = [replace(case, run=lambda _, case=case: figures(case)) for case in gpu.all_cases()]

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        if command[0] != sys.executable:
            return real(command, **options)
        name, words, status = Path(command[1]).name, command[2:], 0
        if name == "gpu.py":
            status = gpu.main(words)
        else:
            assert name == "compare.py"
            given = compare.arguments(words)
            ran.append(f"{given.models[0].stem}, {given.threads}")
            if given.threads == 16:
                raise subprocess.TimeoutExpired(command, options["timeout"])
            given.json.write_text(record(10 * given.threads, 100 * given.threads))
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(gpu, "all_cases", lambda: listed)
    monkeypatch.setattr(session.os, "cpu_count", lambda: 16)
    device = SimpleNamespace(name="a GPU", total_memory=10**11)
    for name, value in (("is_available", True), ("get_device_properties", device), ("synchronize", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    for name in ("dump_traceback_later", "cancel_dump_traceback_later"):  # a captured stream has no file
        monkeypatch.setattr(f"faulthandler.{name}", lambda *_, **_options: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    words = ["--folder", str(tmp_path), "--minutes", "60", "--models", "a.gguf", "--peer", "llama_cpp=py"]
    assert session.main(words) == 0
    assert ran == [*(case.name for case in listed), *(f"a, {n}" for n in (1, 2, 4, 8, 16))]
    assert "a, 16 threads: no result after" in capsys.readouterr().out
    page = (tmp_path / "gpu.md").read_text()
    assert report.NOT_RUN not in page.partition("## Targets")[2].partition("## Who wins where")[0]
    ran.clear()
    assert session.main(words) == 0
    assert ran == ["a, 16"], "a session that goes on runs only what has no result"
