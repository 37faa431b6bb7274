"""Every kernel compiled for three GPUs that are not here: it compiles, fits, and takes no more than on record.

The record is that of the Triton of the extra `test`. It changes with the kernels: see `tests.support.cross_compile`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # of a block, at most
_TARGETS = {80: "sm_80", 90: "sm_90a", 100: "sm_100a"}  # with `a`: also instructions that only this generation has
_ROOT = Path(__file__).parents[4]


Table = dict[str, dict[str, Any]]

_QUICK = {
    80: ["linear I4_128_Z 1", "heads int8", "heads without a cache"],
    90: ["linear Q4_K 8", "decode 8B bfloat16", "sample", "coded e4m3 128 8", "write a latent int8"],
    100: ["rms_norm int8", "gated silu", "delta_rule", "one tile 32"],
}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arch", _SHARED_MEMORY)
def test_kernels_compile_and_take_no_more_than_on_record(arch: int) -> None:
    found, record = _compiled(arch), _record(arch)
    assert found.keys() == record.keys()
    _check(arch, found, record)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", _QUICK)
def test_some_kernels_compile_and_take_no_more_than_on_record(arch: int) -> None:
    found = _compiled(arch, *_QUICK[arch])
    assert {name.split(":")[0] for name in found} == set(_QUICK[arch])
    _check(arch, found, _record(arch))


def _record(arch: int) -> Table:
    found: Table = json.loads((Path(__file__).parent / f"resources_{arch}.json").read_text())
    return found


def _compiled(arch: int, *cases: str) -> Table:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *sys.path])
    command = [sys.executable, "-m", "tests.support.cross_compile", str(arch), *cases]
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: Table = json.loads(done.stdout)
    return found


def _check(arch: int, found: Table, record: Table) -> None:
    for name, taken in found.items():
        known = record[name]
        assert taken["target"] == known["target"] == _TARGETS[arch], name
        assert taken["shared"] <= _SHARED_MEMORY[arch], name
        assert taken["spilled"] <= known["spilled"], name
        assert taken["registers"] <= known["registers"] + 8, name
        assert taken["shared"] <= known["shared"], name
        assert bool(taken["mma"]) == bool(known["mma"]), name
