"""The command line that all targets for atheris share."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import atheris


def run(
    read: Callable[[bytes], None],
    seeds: Mapping[str, bytes],
    mutate: Callable[[bytes, int, int], bytes] | None = None,
) -> None:
    """`--seeds DIR` writes the first corpus; else the arguments are libFuzzer's.

    read: takes one input. seeds: by file name. mutate: from an input, the largest size and a seed to a changed input;
    None: libFuzzer's own changes.
    """
    if sys.argv[1:2] == ["--seeds"]:
        directory = Path(sys.argv[2])
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in seeds.items():
            (directory / name).write_bytes(content)
        return
    options = {} if mutate is None else {"custom_mutator": mutate}
    atheris.Setup(sys.argv, read, **options)
    atheris.Fuzz()


def scratch() -> Path:
    """A folder in memory for this process. libFuzzer ends without cleaning up, so the next process does it."""
    parent = Path("/dev/shm/fuzz")
    parent.mkdir(exist_ok=True)
    for folder in parent.iterdir():
        if not Path("/proc", folder.name.split("-")[0]).exists():
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=parent))
