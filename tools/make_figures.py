#!/usr/bin/env python3
"""Writes the tables of measured figures in pages of docs.

    python tools/make_figures.py [--check]

The figures are in docs/figures, one file per page: docs/figures/lab/quality.json for docs/lab/quality.md. A file maps
names to measurements: the machine, the commit, the date and the command, the titles of the columns, and the rows as the
page shows them. The table is between the lines `<!-- figures NAME -->` and `<!-- end of figures -->`. `--check` writes
nothing and exits 1 if a page differs.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs/figures"
PAGES = tuple(f"docs/{path.relative_to(FIGURES).with_suffix('.md')}" for path in sorted(FIGURES.rglob("*.json")))
PROVENANCE = ("machine", "commit", "date", "command")
_TABLE = re.compile(r"(<!-- figures (\w+) -->\n)(.*?)(<!-- end of figures -->\n)", re.DOTALL)


def records(page: str) -> dict[str, dict[str, Any]]:
    """Return the measurements of a page, by the names of their tables."""
    path = FIGURES / Path(page).relative_to("docs").with_suffix(".json")
    content: dict[str, dict[str, Any]] = json.loads(path.read_text())
    return content


def text_of(record: Mapping[str, Any]) -> str:
    """Return a table in Markdown."""
    lines = (record["columns"], *record["rows"])
    title, *rows = ("|" + "".join(f" {cell} |" if cell else " |" for cell in cells) for cells in lines)
    return "\n".join([title, "|" + "---|" * len(record["columns"]), *rows]) + "\n"


def rewritten(text: str, measured: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page with its tables regenerated. Raises KeyError for a table without a record."""
    return _TABLE.sub(lambda match: f"{match[1]}{text_of(measured[match[2]])}{match[4]}", text)


def problems(text: str, measured: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the records that lack their provenance or their table, and the tables without a record."""
    shown = [match[2] for match in _TABLE.finditer(text)]
    for name in sorted(measured.keys() ^ set(shown)):
        yield f"{name}: {'there is no such table' if name in measured else 'nothing is recorded'}"
    for name in {name for name in shown if shown.count(name) > 1}:
        yield f"{name}: two tables have this name"
    for name, record in measured.items():
        missing = [key for key in PROVENANCE if not record.get(key)]
        if missing:
            yield f"{name}: {', '.join(missing)} is missing"
        if any(len(row) != len(record["columns"]) for row in record["rows"]):
            yield f"{name}: a row has not {len(record['columns'])} cells"


def main() -> int:
    found = []
    for page in PAGES:
        text, measured = (ROOT / page).read_text(), records(page)
        wrong = list(problems(text, measured))
        if not wrong and (new := rewritten(text, measured)) != text:
            if "--check" in sys.argv:
                wrong = ["out of date: run python tools/make_figures.py"]
            else:
                (ROOT / page).write_text(new)
        found += [f"{page}: {each}" for each in wrong]
    print("\n".join(found) or "figures: ok")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
