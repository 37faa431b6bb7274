"""Kernel libraries in `show` and `doctor` on a machine with a GPU, whose properties are replaced here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from octavo.backends.torch.providers.choice import choose
from tests.support.processes import octavo_here
from tests.support.tiny_gguf import tiny_gguf


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An H200 as far as torch reports it. No tensor is put on it."""
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=150 << 30)
    reported = {
        "is_available": True,
        "device_count": 1,
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "mem_get_info": (140 << 30, 150 << 30),
    }
    for name, value in reported.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr("octavo.engine.loading.devices.default_backend", lambda: "torch")
    choose.cache_clear()
    yield
    choose.cache_clear()


def without(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it impossible to find an installed library."""
    from octavo.backends.torch.providers import problems

    found = problems.find_spec
    monkeypatch.setattr(problems, "find_spec", lambda name: None if name == library else found(name))


def test_show_lists_the_provider_of_each_kind_of_operation_and_why_earlier_ones_were_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    without("humming", monkeypatch)
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_gguf())
    lines = json.loads(octavo_here("show", path, "--json").stdout)["providers"]
    assert lines == [
        "attention of prompts: varlen",
        "products of some rows with Q8_0: triton (humming: humming-kernels is not installed "
        "(pip install 'octavo[gpu-fast]'))",
    ]
    result = octavo_here("show", path)
    assert [line for line in (result.stdout + result.stderr).splitlines() if line.startswith("kernels: ")] == [
        f"kernels: {line}" for line in lines
    ]


def test_doctor_lists_each_kernel_library_with_the_reason_if_it_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without("fla", monkeypatch)
    findings = json.loads(octavo_here("doctor", "--json").stdout)
    assert "torch on NVIDIA H200, compute capability 9.0" in findings["torch"]
    assert findings["kernel_libraries"][1:] == [
        "varlen: ready",
        "sdpa: ready",
        "fla: fla-core is not installed (pip install 'octavo[gpu-fast]')",
    ]
    text = " ".join(octavo_here("doctor").stdout.split())
    assert "kernel libraries humming: " in text
    assert "; varlen: ready; sdpa: ready; fla: fla-core is not installed" in text
