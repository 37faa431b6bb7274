"""docs/add_model.md lists every architecture, and says how long its file is."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

from octavo.models import known_architectures

ROOT = Path(__file__).resolve().parents[2]


def test_the_recipe_is_true() -> None:
    recipe = (ROOT / "docs" / "add_model.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \|", recipe.partition("## 1.")[0], re.MULTILINE)
    names = set(known_architectures().values())
    assert sorted(listed) == sorted(names)
    promised = re.search(r"Half of the files have fewer than (\d+) lines", recipe)
    assert promised is not None
    models = ROOT / "src" / "octavo" / "models"
    assert median(len((models / f"{name}.py").read_text().splitlines()) for name in names) < int(promised[1])
