"""Prompts from the columns of CSV and Parquet files."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.batches.lines import BatchLine, LineError
from octavo.batches.runner import next_window
from octavo.batches.tables import read_table
from octavo.errors import UsageError

TABLE = '\ufefftitle,text\r\nA,"one, ""two""\nthree"\r\nB\r\n'


def prompts(path: Path, column: str | None = None, template: str | None = None, system: str | None = None) -> list[str]:
    found = read_table(path, column, template, system)
    return [line.body["messages"][-1]["content"] if isinstance(line, BatchLine) else line.code for line in found]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "in.csv"
    path.write_text(TABLE, encoding="utf-8", newline="")
    return path


def test_prompts_count_as_bytes_of_what_is_read_ahead(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("prompt\n" + f"{'é' * 100_000}\n" * 100, encoding="utf-8")
    assert len(next_window(read_table(path, None, None, None))) == 42  # 8 MiB


def test_a_column_and_a_template(table: Path) -> None:
    assert prompts(table, "text") == ['one, "two"\nthree', "invalid_request"]
    assert prompts(table, template="{title}: {text} {title}") == ['A: one, "two"\nthree A', "invalid_request"]
    first, second = read_table(table, "title", None, "Be brief.")
    assert isinstance(first, BatchLine)
    assert first.body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (first.custom_id, second.custom_id) == ("row-1", "row-2")


def test_the_column_of_the_prompts_may_be_clear(tmp_path: Path, table: Path) -> None:
    (tmp_path / "one.tsv").write_text("custom_id\tquestion\nq7\tWhy?\n")
    (line,) = read_table(tmp_path / "one.tsv", None, None, None)
    assert isinstance(line, BatchLine)
    assert (line.custom_id, line.body["messages"][0]["content"]) == ("q7", "Why?")
    with pytest.raises(UsageError, match="title, text; name the column of the prompts with --column"):
        prompts(table)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"column": "absent"}, "no column 'absent'; it has title, text"),
        ({"template": "no braces"}, "names no column"),
        ({"template": "{absent}"}, "no column 'absent'"),
        ({"column": "text", "template": "{text}"}, "give one of them"),
    ],
)
def test_wrong_columns_are_named(table: Path, options: dict[str, str], part: str) -> None:
    with pytest.raises(UsageError, match=part):
        prompts(table, **options)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_bytes(b"a\n\xff\xfe\n")
    with pytest.raises(UsageError, match="cannot be read as CSV"):
        prompts(tmp_path / "in.csv")


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "in.parquet"
    parquet.write_table(pyarrow.table({"id": [1, 2], "text": ["x", None]}), path)
    found = list(read_table(path, None, "{id}: {text}", None))
    assert isinstance(found[0], BatchLine)
    assert isinstance(found[1], LineError)
    assert found[0].body["messages"][0]["content"] == "1: x"
    path.write_bytes(b"PAR1 not")
    with pytest.raises(UsageError, match="cannot be read as Parquet"):
        prompts(path)
