#!/usr/bin/env python3
"""Check that help texts, docstrings, comments, errors and pages avoid the phrases in prose_patterns.toml.

Each folder has a budget of findings in prose_budgets.toml. The check fails if a folder exceeds its budget.
`--show FOLDER` prints the findings in a folder or file. `--lower` lowers budgets that are larger than needed.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.python_facts import walk  # noqa: E402

PATTERNS = Path("tools") / "prose_patterns.toml"
BUDGETS = Path("tools") / "prose_budgets.toml"
# Depth of the folders that have their own budgets; all other folders count as a whole.
DEPTHS = {"src": 3, "docs": 2}
# Texts by other authors.
SKIPPED = "src/octavo/quality/data/"


class Pattern(NamedTuple):
    """A phrase to avoid, the reason, and the advice."""

    words: list[str]
    find: re.Pattern[str]
    why: str
    instead: str


class Text(NamedTuple):
    """A piece of prose and the number of its first line in the file."""

    line: int
    prose: str


class Finding(NamedTuple):
    """A phrase in a file that matches a pattern."""

    path: str
    line: int
    phrase: str
    pattern: Pattern


def read_patterns(root: Path) -> list[Pattern]:
    entries = tomllib.loads((root / PATTERNS).read_text(encoding="utf-8"))["pattern"]
    return [
        Pattern(
            entry["words"],
            re.compile(entry["find"].replace(" ", r"\s+"), re.IGNORECASE if entry.get("any_case", True) else 0),
            entry["why"],
            entry["instead"],
        )
        for entry in entries
    ]


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def python_texts(source: str) -> Iterator[Text]:
    """Yield docstrings, comment blocks, and the strings of errors, warnings and help."""
    tree = ast.parse(source)
    seen: set[int] = set()
    for node in walk(tree):
        if isinstance(node, _DOCUMENTED):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                yield from _string(first.value, seen)
        elif isinstance(node, ast.Raise) and node.exc is not None:
            yield from _strings(node.exc, seen)
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name.endswith("Error") or name in ("warn", "warning", "error", "info", "echo"):
                yield from _strings(node, seen)
            for keyword in node.keywords:
                if keyword.arg in ("help", "short_help", "epilog", "description"):
                    yield from _strings(keyword.value, seen)
    yield from _comments(source)


def _strings(node: ast.AST, seen: set[int]) -> Iterator[Text]:
    for part in walk(node):
        if isinstance(part, ast.JoinedStr) and id(part) not in seen:
            prose = "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in part.values)
            seen.update(id(value) for value in (part, *part.values))
            yield Text(part.lineno, prose)
        elif isinstance(part, ast.Constant):
            yield from _string(part, seen)


def _string(node: ast.Constant, seen: set[int]) -> Iterator[Text]:
    if isinstance(node.value, str) and id(node) not in seen:
        seen.add(id(node))
        yield Text(node.lineno, node.value)


# A comment and the comment-only lines that follow it. Strings are matched so that a `#` in them is not a comment.
_PYTHON = re.compile(
    r"(?P<quote>\"{3}|'{3}|[\"'])(?:\\.|[^\\])*?(?P=quote)|(?P<comment>#[^\n]*(?:\n[ \t]*#[^\n]*)*)", re.DOTALL
)


def _comments(source: str) -> Iterator[Text]:
    for found in _PYTHON.finditer(source):
        if comment := found["comment"]:
            yield Text(
                source.count("\n", 0, found.start()) + 1, re.sub(r"^[ \t]*#[#! ]*", "", comment, flags=re.MULTILINE)
            )


_CPP = re.compile(
    r'R"(?P<mark>[^\s()\\]*)\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\''
    r"|(?P<comment>//[^\n]*(?:\n[ \t]*//[^\n]*)*|/\*.*?\*/)",
    re.DOTALL,
)


def cpp_texts(source: str) -> Iterator[Text]:
    """Yield comments; consecutive `//` lines are one text."""
    for found in _CPP.finditer(source):
        if comment := found["comment"]:
            prose = re.sub(r"^[ \t]*(//+|/?\*+/?)|\*/$", "", comment, flags=re.MULTILINE)
            yield Text(source.count("\n", 0, found.start()) + 1, prose)


def markdown_texts(source: str) -> Iterator[Text]:
    """Yield the page without code blocks, HTML comments and addresses."""

    def blank(found: re.Match[str]) -> str:
        return "\n" * found[0].count("\n")

    prose = re.sub(r"^([ \t]*)(```+|~~~+).*?^[ \t]*\2[ \t]*$", blank, source, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"<!--.*?-->", blank, prose, flags=re.DOTALL)
    prose = re.sub(r"\]\([^)\s]*\)", "]", prose)
    yield Text(1, prose)


READERS: dict[str, Callable[[str], Iterator[Text]]] = {
    ".py": python_texts,
    ".cpp": cpp_texts,
    ".h": cpp_texts,
    ".md": markdown_texts,
}


def without_code(prose: str) -> str:
    """Replace quoted code by `x`, keeping the number of lines."""
    return re.sub(
        r"(`+)(?!`).+?(?<!`)\1(?!`)", lambda found: "`x`" + "\n" * found[0].count("\n"), prose, flags=re.DOTALL
    )


def find_in(path: str, source: str, patterns: list[Pattern]) -> Iterator[Finding]:
    """Yield all findings in the text of a file."""
    for text in READERS[Path(path).suffix](source):
        prose = without_code(text.prose)
        lower_case = prose.lower()
        for pattern in patterns:
            if not any(word in lower_case for word in pattern.words):
                continue
            for found in pattern.find.finditer(prose):
                line = text.line + prose.count("\n", 0, found.start())
                yield Finding(path, line, " ".join(found[0].split()), pattern)


def find_all(root: Path, under: str = ".") -> list[Finding]:
    """Return the findings in the files of a folder that git does not ignore."""
    patterns = read_patterns(root)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", under],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[Finding] = []
    for path in sorted(set(listed.stdout.split("\0"))):
        if Path(path).suffix in READERS and not path.startswith(SKIPPED) and (root / path).is_file():
            found += find_in(path, (root / path).read_text(encoding="utf-8"), patterns)
    return found


def folder_of(path: str) -> str:
    """Return the folder whose budget a file counts against."""
    parts = path.split("/")[:-1]
    return "/".join(parts[: DEPTHS.get(parts[0], 1)]) if parts else "."


def read_budgets(root: Path) -> dict[str, int]:
    return dict(tomllib.loads((root / BUDGETS).read_text(encoding="utf-8"))["budgets"])


def write_budgets(root: Path, budgets: dict[str, int]) -> None:
    lines = [
        "# Findings of tools/check_prose.py that each folder may have. They only go down: `--lower` writes this file."
    ]
    lines += ["", "[budgets]", *(f'"{folder}" = {count}' for folder, count in sorted(budgets.items()) if count)]
    (root / BUDGETS).write_text("\n".join(lines) + "\n", encoding="utf-8")


def describe(found: Finding) -> str:
    return f"{found.path}:{found.line}: {found.phrase!r} {found.pattern.why}; write {found.pattern.instead}"


def check(root: Path) -> Iterator[str]:
    """Yield a line for each folder above its budget, and for each finding in it."""
    budgets = read_budgets(root)
    findings = find_all(root)
    for folder, count in sorted(Counter(folder_of(found.path) for found in findings).items()):
        if count > (allowed := budgets.get(folder, 0)):
            yield f"{folder}: {count} findings, the budget is {allowed}; rewrite the new ones"
            yield from (f"  {describe(found)}" for found in findings if folder_of(found.path) == folder)


def lower(root: Path) -> None:
    """Lower the budgets of folders that have fewer findings than allowed."""
    counts = Counter(folder_of(found.path) for found in find_all(root))
    write_budgets(root, {folder: min(count, counts[folder]) for folder, count in read_budgets(root).items()})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", metavar="FOLDER", help="print the findings of a folder or file")
    parser.add_argument("--lower", action="store_true", help="write the lower counts to the budgets")
    options = parser.parse_args()
    if options.show is not None:
        for found in find_all(ROOT, options.show):
            print(describe(found))
        return 0
    if options.lower:
        lower(ROOT)
    problems = list(check(ROOT))
    print("\n".join(problems) if problems else "prose: ok")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
