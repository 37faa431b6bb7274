"""Every kernel compiled for three GPUs that are not here: it compiles, fits, and takes no more than on record.

The record is that of the Triton of the extra `test`. It changes with the kernels: see `tests.support.cross_compile`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # of a block, at most
_ROOT = Path(__file__).parents[4]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", _SHARED_MEMORY)
def test_kernels_compile_and_take_no_more_than_on_record(arch: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *sys.path])
    command = [sys.executable, "-m", "tests.support.cross_compile", str(arch)]
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    record = json.loads((Path(__file__).parent / f"resources_{arch}.json").read_text())
    assert found.keys() == record.keys()
    for name, taken in found.items():
        known = record[name]
        assert taken["shared"] <= _SHARED_MEMORY[arch], name
        assert taken["spilled"] <= known["spilled"], name
        assert taken["registers"] <= known["registers"] + 8, name
        assert taken["shared"] <= known["shared"], name
        assert bool(taken["mma"]) == bool(known["mma"]), name
