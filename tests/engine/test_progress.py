"""Progress appears when work lasts, and sizes read well."""

from __future__ import annotations

import io
import re
import sys
import time

import pytest

from octavo.engine.loading import progress_bar as module
from octavo.engine.loading.progress_bar import ProgressBar, size
from tests.support.waiting import wait_until


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, to be moved by tests."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_items_are_announced_without_a_size(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar(announced=True) as progress:
        progress.update("stopping", 0, 1)
        clock[0] += 1.5
        progress.update("stopping", 0, 1)
    assert capsys.readouterr().err == "octavo: stopping\n"


@pytest.mark.parametrize(("announced", "expected"), [(True, "octavo: downloading x, 2.0 MiB\n"), (False, "")])
def test_elsewhere_it_is_one_line_after_a_second(
    clock: list[float], capsys: pytest.CaptureFixture[str], announced: bool, expected: str
) -> None:
    with ProgressBar(in_bytes=True, announced=announced) as progress:
        for _ in range(4):
            progress.update("downloading x", 1 << 20, 2 << 20)
            clock[0] += 0.6
    assert capsys.readouterr().err == expected


def test_elsewhere_lines_tell_what_is_done_and_the_time_left(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """Every half minute; what was done before the work began says nothing about its speed."""
    with ProgressBar(announced=True) as progress:
        for done in range(100, 1200, 5):  # one in two seconds
            progress.update("quantizing layers", done, 1200)
            clock[0] += 10
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == [
        "octavo: quantizing layers",
        "octavo: quantizing layers: 120 of 1,200, about 36 min left",
        "octavo: quantizing layers: 135 of 1,200, about 36 min left",
    ]
    assert lines[-1] == "octavo: quantizing layers: 1,185 of 1,200, about 30 s left"
    with ProgressBar(in_bytes=True, announced=True) as progress:
        for done in range(5):
            progress.update("writing m.gguf", done << 30, 4 << 30)
            clock[0] += 3600
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "octavo: writing m.gguf, 4.00 GiB",
        "octavo: writing m.gguf: 2.00 GiB of 4.00 GiB, about 2 h 00 min left",
        "octavo: writing m.gguf: 3.00 GiB of 4.00 GiB, about 1 h 00 min left",
    ]


def test_what_is_quick_says_nothing(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar(in_bytes=True, announced=True) as progress:
        progress.update("loading", 0, 10)
        clock[0] += 0.5
        progress.update("loading", 10, 10)
    assert capsys.readouterr().err == ""


def test_on_a_terminal_it_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = FakeTerminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(module, "_PATIENCE_S", 0.0)
    with ProgressBar(in_bytes=True) as progress:
        progress.update("packing", 1 << 20, 2 << 20)
        time.sleep(0.02)  # timed: tqdm takes the rate from a clock of its own
        progress.update("packing", 2 << 20, 2 << 20)
    assert "packing" in stream.getvalue()
    assert "2.0/2.0 MiB" in stream.getvalue()
    assert re.search(r"\d:\d\d:\d\d", stream.getvalue())  # the time left
    assert re.search(r"[KMG]iB/s", stream.getvalue())


@pytest.mark.parametrize(("patience_s", "enabled"), [(-1.0, True), (60.0, True), (-1.0, False)])
def test_items_on_a_terminal(monkeypatch: pytest.MonkeyPatch, patience_s: float, enabled: bool) -> None:
    stream = FakeTerminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(module, "_PATIENCE_S", patience_s)
    with ProgressBar(enabled=enabled) as progress:
        for done in range(4):
            progress.update("requests", done, 3)
    if enabled and patience_s < 0:
        assert "requests" in stream.getvalue()
        assert "3/3" in stream.getvalue()
    else:
        assert stream.getvalue() == ""


def test_work_that_reports_nothing_is_shown_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = FakeTerminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(module, "_PATIENCE_S", 0.05)
    with ProgressBar(in_bytes=True, transient=True) as progress:
        progress.update("loading", 0, 0)
        wait_for("loading", stream)
        assert "0 bytes" not in stream.getvalue()
        progress.update("packing", 1 << 20, 2 << 20)
        wait_for("1.0/2.0 MiB", stream)
        assert stream.getvalue().rpartition("packing")[2].count("loading") == 0  # its bar has gone


def test_a_line_comes_after_a_second_without_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.05)
    with ProgressBar(in_bytes=True, announced=True) as progress:
        progress.update("downloading x", 0, 2 << 20)
        said = wait_until(lambda: capsys.readouterr().err)
    assert said + capsys.readouterr().err == "octavo: downloading x, 2.0 MiB\n"


def wait_for(text: str, stream: FakeTerminal) -> None:
    wait_until(lambda: text in stream.getvalue(), lambda: stream.getvalue(), seconds=10)


def test_items_elsewhere_are_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", -1.0)
    with ProgressBar() as progress:
        progress.update("requests", 3, 3)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (98362432, "93.8 MiB"), (5 << 29, "2.50 GiB")],
)
def test_size(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text
