"""The kernels under Triton's interpreter, or compiled where there is a GPU.

Triton reads its variable when a kernel is defined, so it is set while the kernels are imported and not longer: other
tests of the same process, and the programs that they start, are not affected.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

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
