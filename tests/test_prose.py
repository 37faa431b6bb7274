"""tools/check_prose.py: its texts, its patterns, and budgets that only go down."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.scripts import load_script

ROOT = Path(__file__).resolve().parent.parent
prose = load_script(ROOT / "tools" / "check_prose.py")
PATTERNS = prose.read_patterns(ROOT)


def test_no_folder_has_more_findings_than_its_budget() -> None:
    assert list(prose.check(ROOT)) == []


def found(path: str, source: str) -> list[tuple[int, str]]:
    return [(finding.line, finding.phrase) for finding in prose.find_in(path, source, PATTERNS)]


@pytest.mark.parametrize(
    "sentence",
    [
        "Layers, of which one is dense.",
        "The cache in blocks of so many tokens.",
        "The rank's rows and those of the next rank.",
        "One rank leads the others.",
        "A buffer, into memory and from disk, in which the rows are.",
        "The rows, which the others read.",
        "What the cache has of it.",
        "The order is as the file has it.",
        "The kernel is told of the batch.",
        "In an own thread.",
        "The scale stands before the codes.",
        "The codes lie behind the scale.",
        "The scales come as arrays.",
        "The width is what the header says.",
        "The table is made anew.",
        "A row beside the patches.",
        "The likeliest token.",
        "The number of rows; None: no limit.",
        "It takes 0.91 of the time.",
        "All rows but for the last.",
        "The step's rows. width: of a row.",
    ],
)
def test_a_phrase_is_found(sentence: str) -> None:
    assert found("a.md", sentence)


@pytest.mark.parametrize(
    "sentence",
    [
        "It has as many rows as the batch has tokens.",
        "There are so many tokens that the cache is full.",
        "The value must lie between 0 and 1.",
        "One row after the other.",
        "The rank whose rows are read is the first, which is why it waits.",
        "`of which` and `lies in` are code.",
        "[A link](of_which/beside.md) to a page.",
    ],
)
def test_a_plain_sentence_is_not_found(sentence: str) -> None:
    assert found("a.md", sentence) == []


def test_python_docstrings_comments_errors_and_help_are_read() -> None:
    source = '''"""Rows beside rows."""
name = "beside"  # beside
mark = "# beside"

def f(help="x"):
    """One.

    Made
    anew.
    """
    raise ValueError(f"{name} is beside {mark}")

option("--x", help="beside " "y")
'''
    assert sorted(found("a.py", source)) == [(1, "beside"), (2, "beside"), (9, "anew"), (11, "beside"), (13, "beside")]


def test_a_phrase_is_found_across_the_lines_of_a_comment() -> None:
    assert found("a.py", "x = 1\n# Layers, of\n# which one is dense.\n") == [(2, "of which")]
    assert found("a.cpp", "int x;\n// Layers, of\n// which one is dense.\n") == [(2, "of which")]


def test_cpp_strings_are_not_read() -> None:
    assert found("a.h", 'auto x = "// beside";\nauto y = R"(// beside)";\n/* beside */\n') == [(3, "beside")]


def test_code_in_markdown_is_not_read() -> None:
    assert found("a.md", "text\n```sh\nbeside\n```\n<!-- beside -->\nbeside\n") == [(6, "beside")]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with two findings in its folder `docs`."""
    for folder in ("tools", "docs"):
        (tmp_path / folder).mkdir()
    (tmp_path / prose.PATTERNS).write_text((ROOT / prose.PATTERNS).read_text())
    (tmp_path / "docs" / "a.md").write_text("anew\n\nanew\n")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    return tmp_path


def test_more_findings_than_the_budget_fail_with_their_places(repository: Path) -> None:
    prose.write_budgets(repository, {"docs": 1})
    lines = list(prose.check(repository))
    assert lines[0] == "docs: 2 findings, the budget is 1; rewrite the new ones"
    assert lines[2].startswith("  docs/a.md:3: 'anew'")
    prose.write_budgets(repository, {"docs": 2})
    assert list(prose.check(repository)) == []


def test_lower_writes_smaller_counts_and_never_larger_ones(repository: Path) -> None:
    prose.write_budgets(repository, {"docs": 5, "gone": 3})
    prose.lower(repository)
    assert prose.read_budgets(repository) == {"docs": 2}
    prose.write_budgets(repository, {"docs": 1})
    prose.lower(repository)
    assert prose.read_budgets(repository) == {"docs": 1}
