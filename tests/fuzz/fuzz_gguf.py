"""Coverage-guided fuzzing of the GGUF reader with atheris; `docs/fuzzing.md` has the command.

An input is a whole file. It must open, and then every weight must lie within the file, or end in a
ModelLoadError that names the file; anything else is a finding.
"""

from __future__ import annotations

import random

import atheris

with atheris.instrument_imports(include=["octavo.loader"]):
    from octavo.loader.gguf import open_gguf

from octavo.errors import ModelLoadError
from tests.fuzz.target import run, scratch
from tests.support.gguf_writer import TYPE_IDS, Tensor, gguf, key
from tests.support.tiny_gguf import tiny_keys, tiny_tensors

DIRECTORY = scratch()
PATH = DIRECTORY / "model.gguf"
INTERESTING = [0, 1, 2, 7, 8, 9, 31, 32, 33, 255, 256, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1]


def open_bytes(content: bytes) -> None:
    PATH.write_bytes(content)
    try:
        file = open_gguf(PATH)
    except ModelLoadError as error:
        if not str(error).startswith(str(PATH)) or len(str(error)) > 2000:
            raise AssertionError(f"a message without its file, or too long: {error}") from error
        return
    try:
        for name, info in file.tensors.items():
            if info.offset + info.nbytes > len(content):
                raise AssertionError(f"{name} lies beyond the file")
            try:
                weight = file.weight(name)
            except ModelLoadError:
                continue
            if weight.nbytes != info.nbytes or weight.shape != info.shape:
                raise AssertionError(f"{name} is not what the directory says")
    finally:
        file.close()


def mutate(content: bytes, max_size: int, seed: int) -> bytes:
    """libFuzzer's own changes, and one time in three a field of 4 or 8 bytes with a telling value."""
    rng = random.Random(seed)
    if len(content) < 32 or rng.random() < 0.66:
        return bytes(atheris.Mutate(content, max_size))
    size = rng.choice((4, 8))
    at = rng.randrange(4, len(content) - size + 1)
    value = rng.choice(INTERESTING) % (1 << 8 * size)
    return content[:at] + value.to_bytes(size, "little") + content[at + size :]


def seeds() -> dict[str, bytes]:
    """Small good files to start from: every value type, every tensor type, both versions."""
    return {
        "empty": gguf(),
        "metadata": gguf(tiny_keys(), version=2),
        "one": gguf([key("general.alignment", 64)], [Tensor("t", "F32", (2, 8))], alignment=64),
        "types": gguf([], [Tensor(name, name, (256,)) for name in TYPE_IDS]),
        "tiny": gguf(tiny_keys(), tiny_tensors()),
        "kinds": gguf([key(f"k{kind}", 1, kind) for kind in (0, 1, 2, 3, 4, 5, 10, 11)] + [key("l", ["a", "b"])]),
    }


if __name__ == "__main__":
    run(open_bytes, seeds(), mutate)
