"""The documentation site builds, without a warning about a link or a page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("material", reason="the site needs octavo[docs]")
ROOT = Path(__file__).resolve().parents[2]


def test_the_site_builds(tmp_path: Path) -> None:
    """Every link and every page of the navigation exists, and the generated pages have content."""
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert built.returncode == 0, built.stdout + built.stderr
    contents = {
        "reference/commands": "--min-p",
        "reference/options": "max_model_len",
        "reference/python": "temperature",
        "reference/http": "/v1/chat/completions",
        "internals/files": "scheduler.py",
    }
    for page, word in contents.items():
        assert word in (tmp_path / page / "index.html").read_text()
