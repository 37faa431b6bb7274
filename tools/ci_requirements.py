#!/usr/bin/env python3
"""Print the requirements of Octavo and its extras, one per line: `tools/ci_requirements.py [EXTRA...]`.

`.ci/run` installs them, without Octavo itself, while the native library is compiled.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).parents[1]


def requirements(project: dict[str, Any], extra: str) -> Iterator[str]:
    """Yield the requirements of an extra, with Octavo's own extras replaced by their requirements."""
    for requirement in project["optional-dependencies"][extra]:
        own = re.fullmatch(rf"{project['name']}\[([\w,]+)\]", requirement)
        if own is None:
            yield requirement
        else:
            for name in own[1].split(","):
                yield from requirements(project, name)


def main(extras: list[str]) -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in extras for line in requirements(project, extra))]
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
