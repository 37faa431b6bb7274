"""Every script of `benchmarks` finds what it imports: of the others, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_every_script_is_imported() -> None:
    names = sorted(path.stem for path in FOLDER.glob("*.py"))
    assert len(names) > 30
    code = f"import importlib, sys; sys.path.insert(0, {str(FOLDER)!r})\nfor name in {names!r}:\n"
    code += "    try: importlib.import_module(name)\n    except ModuleNotFoundError as error: print(name, error.name)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
