"""Coverage-guided fuzzing of the safetensors reader with atheris; `docs/fuzzing.md` has the command.

An input is a whole file. It must open, and then every tensor must lie within the file, or end in a
ModelLoadError that names the file; anything else is a finding.
"""

from __future__ import annotations

import atheris

with atheris.instrument_imports(include=["octavo.loader"]):
    from octavo.loader.safetensors import open_safetensors

import numpy as np

from octavo.errors import ModelLoadError
from tests.fuzz.target import run, scratch
from tests.support.safetensors_writer import safetensors, with_header

DIRECTORY = scratch()
PATH = DIRECTORY / "model.safetensors"


def open_bytes(content: bytes) -> None:
    PATH.write_bytes(content)
    try:
        model = open_safetensors(PATH)
    except ModelLoadError as error:
        if not str(error).startswith(str(PATH)) or len(str(error)) > 2000:
            raise AssertionError(f"a message without its file, or too long: {error}") from error
        return
    try:
        for name, tensor in model.tensors.items():
            if tensor.offset + tensor.nbytes > len(content):
                raise AssertionError(f"{name} lies beyond the file")
            try:
                weight = model.weight(name)
            except ModelLoadError:
                continue
            if weight.nbytes != tensor.nbytes or weight.shape != tensor.shape:
                raise AssertionError(f"{name} is not what the header says")
    finally:
        model.close()


def with_right_length(content: bytes, max_size: int, seed: int) -> bytes:
    """Changes the header and half of the time writes its true length, so that its text is reached."""
    changed = bytes(atheris.Mutate(content, max_size))
    end = changed.rfind(b"}") + 1
    return with_header(changed[8:end], changed[end:], end - 8) if seed % 2 and end > 8 else changed


def seeds() -> dict[str, bytes]:
    """Small good files to start from."""
    arrays = {"a": np.ones((2, 3), np.float32), "b": np.zeros(4, np.uint16), "c": np.zeros((), np.float16)}
    return {
        "good": safetensors(arrays, {"format": "pt"}),
        "bytes": safetensors({"a": np.zeros(3, np.uint8), "b": np.ones(2, np.float32)}),
    }


if __name__ == "__main__":
    run(open_bytes, seeds(), with_right_length)
