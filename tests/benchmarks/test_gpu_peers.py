"""Peers of the GPU's products: each is optional, and one that cannot take part has a line with the reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
# `gemlite.core` as far as the benchmark calls it, with the numbers of its documentation: (code - zero) * scale.
GEMLITE = """
from enum import Enum
class DType(Enum):
    FP32 = 0
class GemLiteLinearTriton:
    def __init__(self, bits, group_size, in_features, out_features, input_dtype, output_dtype):
        assert (bits, group_size, input_dtype, output_dtype) == (4, 128, DType.FP32, DType.FP32)
        self.group, self.shape = group_size, (out_features, in_features)
    def pack(self, codes, scales, zeros, bias):
        assert codes.shape == self.shape and bias is None
        scales, zeros = (x.repeat_interleave(self.group, dim=1) for x in (scales, zeros))
        self.numbers = (codes - zeros) * scales
    def forward(self, x):
        {answer}
"""

# A build backend that needs no other package.
BACKEND = """
import zipfile
def build_wheel(folder, *_):
    name = "zzpeer-1-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        wheel.writestr("zzpeer.py", "")
        wheel.writestr("zzpeer-1.dist-info/METADATA", "Metadata-Version: 2.1\\nName: zzpeer\\nVersion: 1\\n")
        wheel.writestr("zzpeer-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("zzpeer-1.dist-info/RECORD", "")
    return name
"""


def measured(folder: Path, answer: str) -> dict[str, object]:
    """The case of gemlite in a dry run with this stand-in for the library."""
    package = folder / "gemlite"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "core.py").write_text(GEMLITE.format(answer=answer))
    record = folder / "gpu.json"
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", "--smoke", "--json", record, "--only", "peers, gemlite"]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert record.exists(), done.stderr
    found: dict[str, object] = json.loads(record.read_text())["cases"]["peers, gemlite"]
    return found


def test_a_peer_that_is_there_is_timed_beside_our_product_of_the_same_shape(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    case = measured(tmp_path, "return x @ self.numbers.T")
    assert case["state"] == "done", case
    figures = {figure["name"]: figure for figure in case["figures"]}  # type: ignore[attr-defined]
    ours, theirs = figures["ours, rows 3"]["value"], figures["gemlite, rows 3"]["value"]
    assert figures["gemlite over ours, rows 3"]["value"] == pytest.approx(theirs / ours)


def test_a_peer_with_wrong_products_has_no_figure(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    case = measured(tmp_path, "return x @ self.numbers.T * 1.1")
    assert case["state"] == "wrong result"
    assert not case["figures"]


def test_a_peer_that_refuses_has_a_line_with_its_reason_and_ours_keeps_its_time(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    case = measured(tmp_path, "raise NotImplementedError('no such shape')")
    assert case["state"] == "done"
    names = [figure["name"] for figure in case["figures"]]  # type: ignore[attr-defined]
    assert names == ["ours, rows 3", "gemlite: NotImplementedError: no such shape"]


def package(folder: Path, backend: str) -> None:
    """Write a source package `zzpeer-1.tar.gz` to the folder. A module with the text `backend` builds it."""
    source = folder / "zzpeer-1"
    source.mkdir()
    (source / "backend.py").write_text(backend)
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    with tarfile.open(folder / "zzpeer-1.tar.gz", "w:gz") as archive:
        archive.add(source, arcname="zzpeer-1")


def test_why_a_peer_cannot_be_built(
    script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(sys, "path", [*sys.path])
    peers = script("gpu_peers")
    peer = peers.Peer("zzpeer", None, peers.gemlite_product)
    assert peers.refusal(peer, tmp_path) == f"not installed, and {tmp_path} has no zzpeer-*.tar.gz"
    package(tmp_path, "raise RuntimeError('CUDA 99 is missing')")
    needy = peer._replace(compiler="zz-compiler")
    assert peers.refusal(needy, tmp_path) == "its build needs zz-compiler, which is not on this machine"
    assert peers.refusal(peer, tmp_path) == "it does not build: RuntimeError: CUDA 99 is missing"


def test_a_peer_is_built_from_its_source_package(
    script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(sys, "path", [*sys.path])
    peers = script("gpu_peers")
    package(tmp_path, BACKEND)
    assert peers.refusal(peers.Peer("zzpeer", None, peers.gemlite_product), tmp_path) is None
    assert (tmp_path / "built" / "zzpeer.py").exists()
