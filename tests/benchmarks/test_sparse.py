"""The prototype of sparse products computes what numpy does, in every form, and the table has all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


def test_every_form_is_compared_with_numpy_and_timed(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sparse = script("sparse")
    found = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    if not all(name in found for name in sparse.NEEDED):
        pytest.skip("the prototype is written for AVX-512 with VNNI, VBMI2 and BF16")
    monkeypatch.setattr(sys, "argv", ["sparse.py", "--shape", "16", "512", "--rows", "1", "8", "--turns", "2"])
    sparse.main()  # each product is checked there
    lines = capsys.readouterr().out.splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[1] for row in rows] == 2 * [
        *("8 bits, dense", "8 bits, 2:4", "8 bits, half, bitmap", "Octavo's Q8_0"),
        *("4 bits, dense", "4 bits, 2:4", "Octavo's Q4_K"),
        *("bf16, dense", "bf16, 2:4", "bf16, half, bitmap", "Octavo's BF16"),
    ]
    bits = {row[1]: float(row[2]) for row in rows}
    assert (bits["8 bits, dense"], bits["8 bits, 2:4"], bits["4 bits, 2:4"]) == (8.5, 5.5, 3.5)
    assert (bits["bf16, dense"], bits["bf16, half, bitmap"]) == (16, 9)


def test_rows_that_the_prototype_cannot_hold(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sparse = script("sparse")
    assert f"MAX_COLUMNS = {sparse.MOST_COLUMNS};" in sparse.SOURCE.read_text()
    monkeypatch.setattr(sys, "argv", ["sparse.py", "--shape", "1536", "17920"])
    with pytest.raises(SystemExit):
        sparse.main()
    assert "K is 17920; the prototypes take at most 16384" in capsys.readouterr().err


def test_half_of_the_weights_stay(script: Callable[[str], ModuleType]) -> None:
    sparse = script("sparse")
    rng = sparse.np.random.default_rng(0)
    assert (sparse.mask_of("2:4", 3, 16, rng).reshape(-1, 4).sum(axis=1) == 2).all()
    assert (sparse.mask_of("50 %", 3, 16, rng).sum(axis=1) == 8).all()
