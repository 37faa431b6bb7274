#!/usr/bin/env python3
"""Report which lines of csrc/ ran in a `--coverage` build: `tools/native_coverage.py BUILD_FOLDER [SOURCE_FOLDER]`.

The report is a table of files with the lines that never ran, followed by the total. Headers are compiled once for each
instruction set; a line counts as reached if any of these copies reached it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
GCOV_FILES = 20  # files per gcov process


def counts(build: Path, source: Path) -> dict[str, dict[int, int]]:
    """Return how often each line ran, by file relative to `source`."""
    found: dict[str, dict[int, int]] = defaultdict(dict)
    # Use the notes (.gcno), not the counts (.gcda): code that was compiled but never loaded has no counts.
    notes = sorted(str(path.resolve()) for path in build.rglob("*.gcno"))
    for at in range(0, len(notes), GCOV_FILES):
        command = ["gcov", "--json-format", "--stdout", *notes[at : at + GCOV_FILES]]
        result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=build)
        for text in filter(None, result.stdout.splitlines()):
            report = json.loads(text)
            for file in report["files"]:
                path = Path(report["current_working_directory"], file["file"]).resolve()
                if path.is_relative_to(source):
                    lines = found[str(path.relative_to(source))]
                    for line in file["lines"]:
                        lines[line["line_number"]] = max(lines.get(line["line_number"], 0), line["count"])
    return found


def ranges(numbers: list[int]) -> Iterator[str]:
    """Format numbers as ranges: [1, 2, 3, 7] -> "1-3", "7"."""
    start = end = None
    for number in [*sorted(numbers), None]:
        if start is not None and number != end + 1:
            yield f"{start}-{end}" if end > start else f"{start}"
            start = None
        start = number if start is None else start
        end = number


def main(arguments: list[str]) -> int:
    source = Path(arguments[1]).resolve() if len(arguments) > 1 else ROOT / "csrc"
    found = counts(Path(arguments[0]).resolve(), source)
    if not found:
        print(f"no build with --coverage of {source} under {arguments[0]}")
        return 1
    reached = total = 0
    for name, lines in sorted(found.items()):
        missing = [number for number, count in lines.items() if count == 0]
        reached, total = reached + len(lines) - len(missing), total + len(lines)
        if missing:
            print(f"{name:44} {len(lines) - len(missing):5} of {len(lines):5}   {', '.join(ranges(missing))}")
    print(f"{'TOTAL':44} {reached:5} of {total:5} lines, {100 * reached / total:.1f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
