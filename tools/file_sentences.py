"""The first sentence of every source file, which describes the file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tools.python_facts import python_facts

PATTERNS = {"src/octavo": ("*.py",), "csrc": ("*.cpp", "*.h"), "tools": ("*.py",), "benchmarks": ("*.py",)}


def source_files(root: Path) -> list[Path]:
    """Return all source files of a repository, by folder and name."""
    found = {path for folder, patterns in PATTERNS.items() for each in patterns for path in (root / folder).rglob(each)}
    return sorted(found, key=lambda path: (path.parent.as_posix(), path.name))


def first_sentence(path: Path) -> str:
    """Return the first sentence of a file's docstring, or of a C++ file's first comment. Empty if there is none."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        about = python_facts(text).definitions[0].docstring
    else:
        comment = re.match(r"(?:#[^\n]*\n|\s)*((?://[^\n]*\n)+)", text)
        about = re.sub(r"^//\s?", "", comment[1], flags=re.MULTILINE) if comment else ""
    paragraph = " ".join(about.split("\n\n")[0].split())
    found = re.match(r".*?[.:](?=\s|$)", paragraph)
    return (found[0] if found else paragraph).strip().rstrip(".:") + "." if paragraph else ""


def needs_none(path: Path) -> bool:
    """Return True if the file needs no sentence: an empty `__init__.py`, or C++ code that first includes its own
    header.
    """
    text = path.read_text(encoding="utf-8").strip()
    return not text or (path.suffix == ".cpp" and text.startswith('#include "')) or path.name == "__init__.py"


def silent_files(root: Path) -> Iterator[Path]:
    """Yield the files that lack a sentence about themselves at the start."""
    yield from (path for path in source_files(root) if not first_sentence(path) and not needs_none(path))
