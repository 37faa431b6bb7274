"""The generated tables of the documentation are up to date."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_tables_follow_the_code() -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "tools" / "make_tables.py", "--check"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
