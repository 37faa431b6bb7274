"""Turns the rows of a CSV or Parquet file into lines of a batch.

The prompt comes from a column or a template of columns.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octavo.batches.lines import BatchLine, LineError
from octavo.errors import UsageError

_BRACES = re.compile(r"\{([^{}]+)\}")
_CHAT = "/v1/chat/completions"
_MAX_FIELD = 8 << 20
_ROWS_AT_ONCE = 1024


def read_table(
    path: Path, column: str | None, template: str | None, system: str | None
) -> Iterator[BatchLine | LineError]:
    """Yield a chat for each row. Its custom_id is the value of a column `custom_id`, or else `row-N`.

    column: the column with the prompt. None means the column `prompt` or, if there is none, the only other column than
        `custom_id`.
    template: a prompt with names of columns in braces.
    system: a system message.

    Raises UsageError for a file that cannot be read or lacks a column.
    """
    if column is not None and template is not None:
        raise UsageError("--column and --template both define the prompt; give one of them")
    rows = _parquet(path) if path.suffix.lower() == ".parquet" else _csv(path)
    columns = next(rows)
    names = list(columns)
    wanted = _BRACES.findall(template) if template is not None else [column or _only(path, names)]
    if missing := [name for name in wanted if name not in names]:
        raise UsageError(f"{path} has no column {missing[0]!r}; it has {', '.join(names)}")
    if not wanted:
        raise UsageError(f"--template {template!r} names no column; write one in braces, as in 'Summarize: {{text}}'")
    for number, row in enumerate(rows, 1):
        custom_id = str(row.get("custom_id") or f"row-{number}")
        if any(row.get(name) is None for name in wanted):
            yield LineError(number, custom_id, "invalid_request", f"has no value for {', '.join(wanted)}")
            continue
        prompt = str(row[wanted[0]]) if template is None else _filled(template, row)
        messages = [{"role": "system", "content": system}] if system is not None else []
        body = {"messages": [*messages, {"role": "user", "content": prompt}]}
        yield BatchLine(number, custom_id, _CHAT, body, num_bytes=len(prompt.encode("utf-8", "surrogatepass")))


def _filled(template: str, row: dict[str, Any]) -> str:
    return _BRACES.sub(lambda found: str(row[found[1]]), template)


def _only(path: Path, names: list[str]) -> str:
    """Return the column to use for prompts when none was named."""
    others = [name for name in names if name != "custom_id"]
    if "prompt" in others:
        return "prompt"
    if len(others) != 1:
        raise UsageError(f"{path} has the columns {', '.join(names)}; name the column of the prompts with --column")
    return others[0]


def _csv(path: Path) -> Iterator[dict[str, Any]]:
    """Yield a row whose keys are the column names, and then the rows of the file."""
    csv.field_size_limit(_MAX_FIELD)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
            yield dict.fromkeys(rows.fieldnames or ())
            yield from rows
    except (csv.Error, UnicodeDecodeError, OSError) as error:
        raise UsageError(f"{path} cannot be read as CSV: {error}") from None


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the same for a Parquet file as `_csv` does for a CSV file."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise UsageError(f"{path}: Parquet files need pyarrow; pip install 'octavo[parquet]'") from None
    try:
        with parquet.ParquetFile(path) as file:
            yield dict.fromkeys(file.schema_arrow.names)
            for rows in file.iter_batches(batch_size=_ROWS_AT_ONCE):
                yield from rows.to_pylist()
    except (ArrowException, OSError) as error:
        raise UsageError(f"{path} cannot be read as Parquet: {error}") from None
