"""Modules of benchmarks/ that import each other: scripts, which find their neighbours in their own directory."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="session")
def script() -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of benchmarks/ by its name."""
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module
    sys.path.remove(str(BENCHMARKS))
