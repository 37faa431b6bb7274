"""docs/add_model.md promises line counts; they are true."""

from __future__ import annotations

import re
from pathlib import Path

from octavo.models import known_architectures

ROOT = Path(__file__).resolve().parents[2]


def test_line_counts() -> None:
    recipe = (ROOT / "docs" / "add_model.md").read_text()
    promised = {name: int(count) for name, count in re.findall(r"^\| `(\w+)` \| (\d+) \|", recipe, re.MULTILINE)}
    models = ROOT / "src" / "octavo" / "models"
    counts = {name: len((models / f"{name}.py").read_text().splitlines()) for name in known_architectures().values()}
    assert promised == counts
