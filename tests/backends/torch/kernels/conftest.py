"""The kernels under Triton's interpreter, or compiled where there is a GPU.

Triton reads its variable when a kernel is defined, so it is set while the kernels are imported and not longer: other
tests of the same process, and the programs that they start, are not affected.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from octavo.backends.torch.compile import TorchBackend

_HAS_GPU = torch.cuda.is_available()
_PACKAGE = "octavo.backends.torch.kernels"


def _import_kernels() -> None:
    """Imports every kernel, and Triton itself: its own functions are kernels, too."""
    before = os.environ.get("TRITON_INTERPRET")
    if not _HAS_GPU:
        os.environ["TRITON_INTERPRET"] = "1"
        # What something else has imported would be compiled. Planes need no Triton, and their class stays one.
        mine = [n for n in sys.modules if n.startswith(f"{_PACKAGE}.") and not n.endswith("planes")]
        for name in mine + [n for n in sys.modules if n.split(".")[0] == "triton" and not n.startswith("triton._C")]:
            del sys.modules[name]
    try:
        importlib.import_module("triton.experimental.gluon.nvidia.hopper")  # the first launch would import it
        package = importlib.import_module(_PACKAGE)
        for path in sorted(Path(package.__path__[0]).glob("[a-z]*.py")):
            importlib.import_module(f"{_PACKAGE}.{path.stem}")
    finally:
        if before is None:
            os.environ.pop("TRITON_INTERPRET", None)
        else:
            os.environ["TRITON_INTERPRET"] = before


if importlib.util.find_spec("triton") is None:  # the extra `test` has it
    collect_ignore_glob = ["test_*.py"]
else:
    _import_kernels()


@pytest.fixture
def device() -> torch.device:
    """The device of a kernel test."""
    return torch.device("cuda" if _HAS_GPU else "cpu")


@pytest.fixture
def backend(device: torch.device) -> TorchBackend:
    """The backend of a test of whole steps, in float32 and without captures. Only a test's `calls` say what runs."""
    return TorchBackend(device, torch.float32)


_BUDGET_S = 200  # of processor time, with what a busy machine adds: it has taken up to 165 s
_LOOP_S = 0.039  # of `_loop` on the machine of the budget; a slower one has more of both


@cache
def budget() -> float:
    """The processor time of all tests of the default run on this machine."""
    return _BUDGET_S * max(1.0, min(_loop() for _ in range(3)) / _LOOP_S)


def _loop() -> float:
    """Seconds of some work as the interpreter does it: Python with small objects."""
    begun = time.thread_time()
    found: dict[int, int] = {}
    for i in range(300_000):
        found[i % 1000] = found.get((i * 7) % 1000, 0) + len(str(i))
    return time.thread_time() - begun


def spent(spent_before: Path, seconds: float) -> float:
    """Adds the seconds of a test to those of all others of this run, whichever process runs them. Returns the sum."""
    with spent_before.open("a") as file:
        file.write(f"{seconds:.3f}\n")
    return sum(float(line) for line in spent_before.read_text().splitlines())


@pytest.fixture(autouse=True)
def processor_time(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fails the test that exceeds the time which all tests of the default run may take together."""
    begun = _processor_time()
    yield
    if _HAS_GPU or request.node.get_closest_marker("slow"):
        return
    base = tmp_path_factory.getbasetemp()
    together = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    total = spent(together / "kernel-tests", _processor_time() - begun)
    if total > budget():
        pytest.fail(
            f"the kernel tests of the default run have taken {total:.0f} s of processor time, at most {budget():.0f}: "
            "make some smaller, or mark them slow"
        )


def _processor_time() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
