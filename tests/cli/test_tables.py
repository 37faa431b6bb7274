"""Tables and facts fit a terminal, have colours there, and are whole on a pipe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from octavo.cli import terminal
from octavo.loader import library
from tests.support.processes import octavo_here

ROWS = [
    {"NAME": "smollm2", "SIZE": "93.8 MiB", "PATH": "/home/you/.cache/" + "x" * 80 + "/SmolLM2.gguf"},
    {"NAME": "b", "SIZE": "1 B", "PATH": "/b"},
]


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(terminal, "is_terminal", lambda _: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return 80


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()


def test_a_table_is_cut_in_the_middle_of_its_widest_column(columns: int, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.write_table(ROWS, right=("SIZE",))
    lines = shown(capsys)
    assert max(map(len, lines)) <= columns
    assert lines[1].startswith("smollm2  93.8 MiB  /home/you")
    assert lines[1].endswith("/SmolLM2.gguf")
    assert "…" in lines[1]
    assert lines[2] == "b             1 B  /b"


def test_facts_go_on_below(columns: int, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.write_facts({"a": "word " * 40, "long": "x"})
    lines = shown(capsys)
    assert max(map(len, lines)) <= columns
    assert lines[1].startswith("      word")
    assert lines[-1] == "long  x"


@pytest.mark.usefixtures("columns")
def test_colours_can_be_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.write_table([{"STATE": "ready"}], colours={"ready": "green"})
    assert capsys.readouterr().out == "\x1b[1mSTATE\x1b[0m\n\x1b[32mready\x1b[0m\n"
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            terminal.write_table([{"STATE": "ready"}], colours={"ready": "green"})
            assert capsys.readouterr().out == "STATE\nready\n"


def test_a_pipe_gets_all(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.write_table(ROWS)
    assert ROWS[0]["PATH"] in capsys.readouterr().out


@pytest.mark.usefixtures("columns")
@pytest.mark.parametrize("command", [("show", "smollm2"), ("doctor",), ("list",), ("ps",)])
def test_commands_fit_80_columns(command: tuple[str, ...], smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del smollm2_path
    monkeypatch.setattr("octavo.cli.doctor._SAMPLE_S", 0)
    monkeypatch.setattr("octavo.cli.doctor._torch", lambda: (None, []))
    out = re.sub(r"\x1b\[[0-9;]*m", "", octavo_here(*command).stdout)
    assert out
    assert not [line for line in out.splitlines() if len(line) > 80 and "/" not in line]  # a path stays whole


def test_used_files_are_on_the_list(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "models" / "own.gguf"
    file.parent.mkdir()
    file.write_bytes(tiny.read_bytes())
    assert octavo_here("run", file, "ab", "--raw", "-n", "1").returncode == 0
    assert "~/models/own.gguf" in octavo_here("list").stdout
    assert (
        octavo_here("rm", "~/models/own.gguf").stdout == "removed ~/models/own.gguf from the list; the file is kept\n"
    )
    assert file.exists()
    assert not library.installed()
    octavo_here("run", file, "ab", "--raw", "-n", "1")
    file.unlink()
    assert not library.installed()
