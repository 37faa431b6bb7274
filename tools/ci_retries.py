#!/usr/bin/env python3
"""Record tests that failed in `.ci/run` but passed on their own. The third time counts as a failure.

    python tools/ci_retries.py failed           list the tests that failed according to pytest's cache, one per line
    python tools/ci_retries.py record FILE      record that the tests in FILE passed on their own; exit with 1 the third
                                                time

The record is `.ci/retried.json`, a file in the repository. Commit it with the change whose run wrote it. Whoever fixes
a test removes its lines.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST = 2  # how often a test may fail in a run and pass on its own
FAILED = Path(".pytest_cache/v/cache/lastfailed")
RETRIED = Path(".ci/retried.json")


def failed_tests(folder: Path) -> list[str]:
    path = folder / FAILED
    return sorted(json.loads(path.read_text())) if path.exists() else []


def load(path: Path) -> dict[str, list[str]]:
    return json.loads(path.read_text()) if path.exists() else {}


def merged(records: list[dict[str, list[str]]]) -> dict[str, list[str]]:
    """Merge the records. Each occasion counts once per test."""
    names = sorted({name for record in records for name in record})
    return {name: sorted({time for record in records for time in record.get(name, [])}) for name in names}


def record(tests: list[str], paths: list[Path], occasion: str) -> list[str]:
    """Add this occasion to each test's record, in all files. Return the tests that have more than MOST occasions."""
    total = merged([*map(load, paths), {test: [occasion] for test in tests}])
    for path in paths:
        path.write_text(json.dumps(total, indent=2) + "\n")
    return [test for test in tests if len(total[test]) > MOST]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("failed")
    commands.add_parser("record").add_argument("file", type=Path)
    chosen = parser.parse_args(arguments)
    if chosen.command == "failed":
        sys.stdout.writelines(f"{test}\n" for test in failed_tests(ROOT))
        return 0
    tests = chosen.file.read_text().splitlines()
    paths = [ROOT / RETRIED]
    if cache := os.environ.get("OCTAVO_CI_CACHE"):
        paths.append(Path(cache) / RETRIED.name)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    occasion = f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M} {commit.strip()}"
    too_often = record(tests, paths, occasion)
    for test in tests:
        sys.stdout.write(f"passed alone, recorded in {RETRIED}: {test}\n")
    for test in too_often:
        sys.stdout.write(f"{test} has passed alone more than {MOST} times: mend it, and remove its lines\n")
    return 1 if too_often else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
