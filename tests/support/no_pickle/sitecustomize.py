"""Python loads this automatically when a test puts its directory on the path: this process then cannot pickle.

OCTAVO_TEST_MARKS is a directory in which each process that has loaded this leaves a file with its id.
"""

from __future__ import annotations

import _pickle
import marshal
import os
import pickle
from pathlib import Path
from typing import NoReturn


def _refuse(*_: object, **__: object) -> NoReturn:
    raise AssertionError("this process has pickled something, or read what was")


if "OCTAVO_TEST_MARKS" in os.environ:
    for module in (pickle, _pickle):
        for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
            setattr(module, name, _refuse)
    marshal.dumps = _refuse  # marshal.loads reads the interpreter's own modules
    (Path(os.environ["OCTAVO_TEST_MARKS"]) / str(os.getpid())).touch()
