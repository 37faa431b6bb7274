"""NUMA nodes that this machine does not have."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.platform import numa


def pretend(monkeypatch: pytest.MonkeyPatch, root: Path, *cpulists: str) -> None:
    """Pretend that there is one node per list of CPUs, written as the kernel does."""
    for node, text in enumerate(cpulists):
        (root / f"node{node}").mkdir()
        (root / f"node{node}" / "cpulist").write_text(text + "\n")
    monkeypatch.setattr(numa, "NODES", root)
