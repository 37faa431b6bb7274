"""NUMA nodes that this machine does not have."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.platform import numa


def pretend(monkeypatch: pytest.MonkeyPatch, root: Path, *cpulists: str) -> None:
    """A node for each list of CPUs, as the kernel writes it."""
    for node, text in enumerate(cpulists):
        (root / f"node{node}").mkdir()
        (root / f"node{node}" / "cpulist").write_text(text + "\n")
    monkeypatch.setattr(numa, "NODES", root)
