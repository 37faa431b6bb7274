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


_COUNTING = """
import json, re, torch
torch.set_default_device("meta")
from tests.support.cross_compile import compiled
found = {}
for case, kernel in compiled(90, ["decode 8B float8_e4m3fn", "decode 8B int8"]):
    if "merge" not in kernel.name:
        words = re.findall(r"\\b(?:cvt|prmt|mma)\\.[.\\w]*", kernel.asm["ptx"])
        found[case] = {word: words.count(word) for word in set(words)}
print(json.dumps(found))
"""


@pytest.mark.timeout(300)
def test_numbers_of_eight_bits_are_converted_in_pairs_or_not_at_all() -> None:
    """By a Hopper's decode step: E4M3 by one instruction for two numbers, int8 by moved bytes, both into float16."""
    found: Table = json.loads(_run("-c", _COUNTING))
    # Keys and values of 64 tokens, 128 columns each, by 64 threads; loops with masks and without.
    assert found["decode 8B float8_e4m3fn"]["cvt.rn.f16x2.e4m3x2"] == 2 * 2 * 64 * 128 // 64 // 2
    for case in found.values():
        assert case["mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"] >= 64
        assert not [word for word in case if "cvt.rn.bf16" in word or "cvt.rn.f32.s8" in word]
        assert case["cvt.rn.f16x2.f32"] <= 32  # of probabilities and queries
    # Four numbers take two moves; the operands of products are transposed by further ones.
    assert found["decode 8B int8"]["prmt.b32"] >= 2 * 2 * 64 * 128 // 128 // 4 * 2


def _record(arch: int) -> Table:
    found: Table = json.loads((Path(__file__).parent / f"resources_{arch}.json").read_text())
    return found


def _compiled(arch: int, *cases: str) -> Table:
    found: Table = json.loads(_run("-m", "tests.support.cross_compile", str(arch), *cases))
    return found


def _run(*words: str) -> str:
    """The output of Python with these words on its command line, without the interpreter of kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *sys.path])
    done = subprocess.run(
        [sys.executable, *words], cwd=_ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def _check(arch: int, found: Table, record: Table) -> None:
    for name, taken in found.items():
        known = record[name]
        assert taken["target"] == known["target"] == _TARGETS[arch], name
        assert taken["shared"] <= _SHARED_MEMORY[arch], name
        assert taken["spilled"] <= known["spilled"], name
        assert taken["registers"] <= known["registers"] + 8, name
        assert taken["shared"] <= known["shared"], name
        assert bool(taken["mma"]) == bool(known["mma"]), name
