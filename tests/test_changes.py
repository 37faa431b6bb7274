"""Fragments of the changelog have a known kind and one short sentence."""

from __future__ import annotations

import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
MOST_WORDS = 15


def test_fragments_are_short_and_of_a_known_kind() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    kinds = "|".join(kind["directory"] for kind in project["tool"]["towncrier"]["type"])
    for path in sorted((ROOT / "changes").iterdir()):
        if path.name == "README.md":
            continue
        assert re.fullmatch(rf"[+\w-]+\.({kinds})\.md", path.name), path.name
        assert 0 < len(path.read_text().split()) <= MOST_WORDS, path.name


def test_released_entries_are_short() -> None:
    """At most 20 words: those of 0.1.0 name whole parts of the program."""
    text = (ROOT / "CHANGELOG.md").read_text().split("<!-- towncrier release notes start -->")[1]
    entries = [line for line in text.splitlines() if line.startswith("- ")]
    assert entries
    assert [line for line in entries if len(line.split()) > 20] == []
