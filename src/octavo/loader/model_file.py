"""The file of a model among those of a directory."""

from __future__ import annotations

import os
from pathlib import Path

from octavo.errors import ModelLoadError
from octavo.loader.gguf import part_names
from octavo.loader.pickles import check_no_pickles
from octavo.loader.safetensors import INDEX_NAME

_MODEL_SUFFIXES = (".gguf", ".safetensors", ".safetensors.index.json")


def find_model_file(path: Path) -> Path:
    """The file to open for a model given as file or directory.

    It is a GGUF file (the first part of a split one), or a safetensors file or the index of a sharded one with
    `config.json` beside it. Raises ModelLoadError if there is none or the choice is ambiguous.
    """
    try:
        if path.is_dir():
            names = sorted(p.name for p in path.iterdir())
        elif path.name.endswith(_MODEL_SUFFIXES) or is_gguf(path):
            return path
        elif path.exists():
            names = [path.name]
        else:
            raise ModelLoadError(f"{path}: no such file or directory")
    except OSError as error:
        raise ModelLoadError(f"{path}: {error.strerror}") from error
    if INDEX_NAME in names:
        return path / INDEX_NAME
    safetensors = [path / name for name in names if name.endswith(".safetensors")]
    if "config.json" in names and len(safetensors) == 1:
        return safetensors[0]
    models = [name for name in names if name.endswith(".gguf") and not is_mmproj(name)]
    ggufs = {Path(part_names(str(path / name), os.path.exists)[0]) for name in models}
    if len(ggufs) == 1 and not safetensors:
        return ggufs.pop()
    if safetensors and "config.json" not in names:
        raise ModelLoadError(f"{path / 'config.json'}: no such file; safetensors models need it")
    if found := sorted(p.name for p in [*ggufs, *safetensors]):
        raise ModelLoadError(f"{path}: {len(found)} models; name one of them: {', '.join(found[:10])}")
    check_no_pickles(path, names, "Take the safetensors or GGUF files of the same model")
    raise ModelLoadError(f"{path}: no model; a .gguf or .safetensors file is needed")


def is_mmproj(name: str) -> bool:
    """True by the name of a GGUF file: it has the part of a model that sees, and is no model itself."""
    return "mmproj" in name.lower()


def is_gguf(path: Path) -> bool:
    """True by the suffix of the file or, with another suffix, by its first bytes."""
    if path.name.endswith(_MODEL_SUFFIXES) or not path.is_file():
        return path.suffix == ".gguf"
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"
