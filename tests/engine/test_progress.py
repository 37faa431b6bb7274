"""The progress bar: only on a terminal, only for what takes long."""

from __future__ import annotations

import io

import pytest

from octavo.engine import progress
from octavo.engine.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, delay_s: float, enabled: bool = True) -> str:
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setattr(progress, "_DELAY_S", delay_s)
    with ProgressBar(3, "requests", enabled) as bar:
        for _ in range(3):
            bar.advance()
    return stderr.getvalue()


def test_on_a_terminal_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    text = run(monkeypatch, Terminal(), -1.0)
    assert "requests" in text
    assert "3/3" in text


@pytest.mark.parametrize(
    ("stderr", "delay_s", "enabled"), [(io.StringIO(), -1.0, True), (Terminal(), 60.0, True), (Terminal(), -1.0, False)]
)
def test_else_nothing(monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, delay_s: float, enabled: bool) -> None:
    assert run(monkeypatch, stderr, delay_s, enabled) == ""
