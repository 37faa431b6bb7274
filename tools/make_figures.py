#!/usr/bin/env python3
"""Write the tables of measured figures in README and docs, and find figures in their sentences that are not recorded.

    python tools/make_figures.py [--check]

The figures are in docs/figures, one file per page: docs/figures/lab/quality.json for docs/lab/quality.md. A file maps
names to measurements: the machine, commit, date and command, the column titles, and the rows as the page shows them. On
the page, a table is between the lines `<!-- figures NAME -->` and `<!-- end of figures -->`. For figures in sentences,
`statements` lists phrases of the page, word for word, instead of titles and rows. A quantity in a sentence must be in a
statement or a table of its page, or in unmeasured.toml: limits, defaults, sizes, computed figures. On the pages of
results, every number with a decimal point counts as well. `--check` writes nothing and exits with 1 if a page differs.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs/figures"
UNMEASURED = ROOT / "tools/unmeasured.toml"
GENERATED = "docs/lab/performance_gpu.md"  # by benchmarks/gpu.py, from its own record
RESULTS = ("docs/accuracy.md", "docs/lab/", "docs/results.md")
TEXTS = ("README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")))
PROVENANCE = ("machine", "commit", "date", "command")
_UNITS = (
    "ns|us|µs|ms|s|[a-z]*seconds?|minutes?|hours?|times|%|cycles|nats|instructions|tokens/s|tokens (?:a|per) second|"
    "[kMG]B/s|G/s|[GT]FLOP/s|[kKMGT]i?B|G multiply-adds"
)
_QUANTITY = re.compile(rf"(?<![\w.-])\d[\d.,]*(?: ?(?:{_UNITS}))(?![\w/])")
_DECIMAL = re.compile(r"(?<![\w.-])\d+\.\d+(?![\w-]|\.\d)")
_CODE = re.compile(r"^```[\s\S]*?^```$|(?<=\n\n)(?: {4}.*\n)+|`[^`\n]*`", re.MULTILINE)
_TABLE = re.compile(r"(<!-- figures (\w+) -->\n)(.*?)(<!-- end of figures -->\n)", re.DOTALL)


def records(page: str) -> dict[str, dict[str, Any]]:
    """Return the measurements of a page by name."""
    path = FIGURES / Path(page.removeprefix("docs/")).with_suffix(".json")
    content: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    return content


PAGES = tuple(page for page in TEXTS if records(page))


def text_of(record: Mapping[str, Any]) -> str:
    """Return a table as Markdown."""
    lines = (record["columns"], *record["rows"])
    title, *rows = ("|" + "".join(f" {cell} |" if cell else " |" for cell in cells) for cells in lines)
    return "\n".join([title, "|" + "---|" * len(record["columns"]), *rows]) + "\n"


def rewritten(text: str, measured: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page with its tables regenerated. Raises KeyError for a table without a record."""
    return _TABLE.sub(lambda match: f"{match[1]}{text_of(measured[match[2]])}{match[4]}", text)


def problems(text: str, measured: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the records that lack their provenance or their table, and the tables without a record."""
    shown = [match[2] for match in _TABLE.finditer(text)]
    tables = {name for name, record in measured.items() if "rows" in record}
    for name in sorted(tables ^ set(shown)):
        yield f"{name}: {'there is no such table' if name in tables else 'nothing is recorded'}"
    for name in {name for name in shown if shown.count(name) > 1}:
        yield f"{name}: two tables have this name"
    for name, record in measured.items():
        missing = [key for key in PROVENANCE if not record.get(key)]
        if missing:
            yield f"{name}: {', '.join(missing)} is missing"
        if any(len(row) != len(record["columns"]) for row in record.get("rows", ())):
            yield f"{name}: a row has not {len(record['columns'])} cells"
        for statement in record.get("statements", ()):
            if statement not in " ".join(text.split()):
                yield f"{name}: the page does not contain {statement!r}"


def unrecorded(page: str, text: str, measured: Mapping[str, Mapping[str, Any]], unmeasured: Iterable[str]) -> list[str]:
    """Return the quantities in a page's sentences that no record and no entry of `unmeasured` explains."""
    prose = " ".join(_CODE.sub(lambda match: match[0] if match[0][0] == "`" else "", _TABLE.sub("", text)).split())
    cells = set()
    for record in measured.values():
        for statement in record.get("statements", ()):
            prose = prose.replace(statement, "")
        content = " ".join(cell for row in record.get("rows", ()) for cell in row)
        cells |= {*_QUANTITY.findall(content), *_DECIMAL.findall(content)}
    prose = _CODE.sub("", prose)
    found = _QUANTITY.findall(prose)
    if page.startswith(RESULTS):
        found += _DECIMAL.findall(_QUANTITY.sub("", prose))
    return [quantity for quantity in found if quantity not in cells and quantity not in unmeasured]


def main() -> int:
    found = []
    unmeasured = tomllib.loads(UNMEASURED.read_text())
    for page in TEXTS:
        text, measured = (ROOT / page).read_text(), records(page)
        wrong = list(problems(text, measured))
        if not wrong and (new := rewritten(text, measured)) != text:
            if "--check" in sys.argv:
                wrong = ["out of date: run python tools/make_figures.py"]
            else:
                (ROOT / page).write_text(new)
        if page != GENERATED and (unknown := unrecorded(page, text, measured, unmeasured.get(page, ()))):
            wrong.append(f"neither in docs/figures nor in {UNMEASURED.name}: {'; '.join(unknown)}")
        found += [f"{page}: {each}" for each in wrong]
    print("\n".join(found) or "figures: ok")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
