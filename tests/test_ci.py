"""The tools of `.ci/run`: budgets of time, the record of tests that passed alone, the parts of the second stage."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.scripts import load_script

ROOT = Path(__file__).parents[1]


def tool(name: str) -> ModuleType:
    return load_script(ROOT / "tools" / f"{name}.py")


def run_with_budget(folder: Path, test: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(test)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.time_budget", "-p", "no:cacheprovider"]
    environment = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [*command, *options, str(folder)], env=environment, capture_output=True, text=True, cwd=folder
    )


BUSY = "import time\ndef test_busy():\n    end = time.process_time() + 0.2\n    while time.process_time() < end: pass\n"


@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "1")])
def test_a_test_over_its_budget_fails(tmp_path: Path, workers: tuple[str, ...]) -> None:
    result = run_with_budget(tmp_path, BUSY, "--test-budget", "0.1", "--total-budget", "60", *workers)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "test_busy took 0." in result.stdout
    assert "its budget is 0.1" in result.stdout


def test_a_total_over_its_budget_fails(tmp_path: Path) -> None:
    result = run_with_budget(tmp_path, BUSY, "--test-budget", "60", "--total-budget", "0.1")
    assert result.returncode == 6, result.stdout + result.stderr
    assert "the budget of all tests is 0.1" in result.stdout


def test_waiting_takes_no_budget(tmp_path: Path) -> None:
    waits = "import select\ndef test_wait():\n    select.select([], [], [], 0.3)\n"
    result = run_with_budget(tmp_path, waits, "--test-budget", "0.2", "--total-budget", "10")
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_third_time_that_a_test_passes_alone_fails(tmp_path: Path) -> None:
    retries = tool("ci_retries")
    here, kept = tmp_path / "retried.json", tmp_path / "cache.json"
    assert retries.record(["a", "b"], [here, kept], "Monday") == []
    here.unlink()  # a clone without the record of the first run, but with the kept one
    assert retries.record(["a"], [here, kept], "Tuesday") == []
    assert retries.record(["a"], [here, kept], "Tuesday") == []  # the same occasion
    assert retries.record(["b", "a"], [here, kept], "Wednesday") == ["a"]
    assert json.loads(here.read_text()) == {"a": ["Monday", "Tuesday", "Wednesday"], "b": ["Monday", "Wednesday"]}


def test_failed_tests_are_read_from_the_cache_of_pytest(tmp_path: Path) -> None:
    retries = tool("ci_retries")
    assert retries.failed_tests(tmp_path) == []
    (tmp_path / "test_it.py").write_text("def test_good(): pass\ndef test_bad(): assert 0\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", str(tmp_path)]
    subprocess.run(command, cwd=tmp_path, capture_output=True, env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    assert retries.failed_tests(tmp_path) == ["test_it.py::test_bad"]


@pytest.fixture
def parts(tmp_path: Path) -> ModuleType:
    """The tool over a repository of one part, `web`."""
    module = tool("ci_parts")
    module.ROOT = tmp_path
    module.PARTS = {"web": module.Part(("src",), ("tests/test_web_*.py",), ("extra",))}
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    for folder in ("src", "tests", ".ci"):
        (tmp_path / folder).mkdir()
    (tmp_path / "src" / "page.js").write_text("1")
    (tmp_path / "tests" / "test_web_page.py").write_text("")
    (tmp_path / "tests" / "test_other.py").write_text("")
    (tmp_path / "pyproject.toml").write_text('[project]\noptional-dependencies = {extra = ["a"], other = ["b"]}\n')
    return module


def test_a_part_is_due_until_it_has_passed(parts: ModuleType) -> None:
    assert parts.due(everything=False) == ["web"]
    parts.record(["web"])
    assert parts.due(everything=False) == []
    assert parts.due(everything=True) == ["web"]


@pytest.mark.parametrize(
    ("name", "text", "is_due"),
    [
        ("src/page.js", "2", True),
        ("src/new.js", "", True),
        ("tests/test_web_page.py", "assert 1", True),
        ("tests/test_other.py", "assert 1", False),
        ("pyproject.toml", '[project]\noptional-dependencies = {extra = ["a>1"], other = ["b"]}\n', True),
        ("pyproject.toml", '[project]\noptional-dependencies = {extra = ["a"], other = ["c"]}\n', False),
    ],
)
def test_a_part_is_due_when_its_files_or_requirements_change(
    parts: ModuleType, name: str, text: str, is_due: bool
) -> None:
    parts.record(["web"])
    (parts.ROOT / name).write_text(text)
    assert bool(parts.due(everything=False)) == is_due


def test_a_part_is_due_when_a_file_is_gone(parts: ModuleType) -> None:
    parts.record(["web"])
    (parts.ROOT / "src" / "page.js").unlink()
    assert parts.due(everything=False) == ["web"]


def test_the_gate_leaves_out_what_the_parts_test(parts: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert parts.main(["elsewhere"]) == 0
    assert capsys.readouterr().out == "--ignore=tests/test_web_page.py\n"
    assert parts.main(["tests", "web"]) == 0
    assert capsys.readouterr().out == "tests/test_web_page.py\n"


def test_every_part_of_this_repository_has_its_files() -> None:
    module = tool("ci_parts")
    for name, part in module.PARTS.items():
        for pattern in (*part.files, *part.tests):
            assert list(ROOT.glob(pattern)), f"{name}: nothing is called {pattern}"


def test_native_coverage_names_the_lines_that_never_ran(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which("g++") is None or shutil.which("gcov") is None:
        pytest.skip("g++ is not installed")
    source = tmp_path / "it.cpp"
    source.write_text("int half(int x) {\nif (x > 0)\nreturn x / 2;\nreturn 7;\n}\nint main() { return half(1); }\n")
    for command in (["g++", "--coverage", "-O0", "it.cpp", "-o", "it"], ["./it"]):
        subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    assert tool("native_coverage").main([str(tmp_path), str(tmp_path)]) == 0
    report = capsys.readouterr().out.split("\n")
    assert report[0].split() == ["it.cpp", "4", "of", "5", "4"]
    assert report[1].split() == ["TOTAL", "4", "of", "5", "lines,", "80.0", "%"]


def test_requirements_hold_those_of_extras_of_its_own_and_not_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert tool("ci_requirements").main(["test", "ray"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for start in ("numpy", "pytest>", "opentelemetry-sdk", "ray["):
        assert any(line.startswith(start) for line in lines), start
    assert not any(line.startswith("octavo") for line in lines)


MOST_TIMED_SLEEPS = 123  # it only falls


def test_no_more_tests_sleep_on_a_clock() -> None:
    """A time that was chosen is too short on a busy machine: `tests/support/waiting.py` waits for a condition."""
    sleeps = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"sleep\((0\.|[1-9])", line)
    ]
    assert len(sleeps) <= MOST_TIMED_SLEEPS, "\n".join(sleeps)
