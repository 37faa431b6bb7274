"""Finds the model file in a directory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import TypeVar

from octavo.errors import ModelLoadError
from octavo.loader.gguf import part_names
from octavo.loader.pickles import check_no_pickles
from octavo.loader.safetensors import INDEX_NAME

_MODEL_SUFFIXES = (".gguf", ".safetensors", ".safetensors.index.json")
# Types of vision files in order of preference: the best one that is not needlessly large comes first.
_MMPROJ_TYPES = ("F16", "BF16", "Q8_0", "F32")
_MMPROJ_TYPE = re.compile(r"[-._](f16|bf16|f32|[a-z]*q[0-9]\w*)(?=\.gguf$)", re.IGNORECASE)
PathT = TypeVar("PathT", bound=PurePath)
_TYPE_FOLDER = re.compile(r"(?:ud-)?(?:iq|q|tq|f|bf|mxfp)[0-9]\w*", re.IGNORECASE)


def find_model_file(path: Path) -> Path:
    """Return the file to open for a model given as file or directory.

    It is a GGUF file (the first part of a split one), or a safetensors file or the index of a sharded one, next to a
    `config.json`. Raises ModelLoadError if there is none or the choice is ambiguous.
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
    check_no_pickles(path, names, "Use the safetensors or GGUF files of the same model")
    raise ModelLoadError(f"{path}: no model; a .gguf or .safetensors file is needed")


def is_mmproj(name: str) -> bool:
    """Return True for the name of a GGUF file that contains a model's vision part and is not a model itself."""
    return "mmproj" in name.lower()


def mmproj_files(model: Path) -> list[Path]:
    """Return the vision files for a GGUF file.

    They are next to it or, if its folder is named after a type such as `Q4_K_M`, in the folder above. If the files
    differ only in the type of their weights, only the best one is returned.
    """
    beside = next(filter(None, (_mmproj_in(folder, model) for folder in mmproj_folders(model))), [])
    stems = {_MMPROJ_TYPE.sub("", path.name) for path in beside}
    return beside if len(stems) > 1 else beside[:1]


def mmproj_folders(model: PathT) -> list[PathT]:
    """Return the folders in which to look for the vision file of a GGUF file.

    The first folder that contains one is used.
    """
    beside = model.parent
    return [beside, beside.parent] if _TYPE_FOLDER.fullmatch(beside.name) else [beside]


def best_mmproj(names: Iterable[str]) -> list[str]:
    """Return the names of vision files, the best types first."""

    def rank(name: str) -> tuple[int, str]:
        found = _MMPROJ_TYPE.search(name)
        kind = "" if found is None else found[1].upper()
        return _MMPROJ_TYPES.index(kind) if kind in _MMPROJ_TYPES else len(_MMPROJ_TYPES), name

    return sorted(names, key=rank)


def _mmproj_in(folder: Path, model: Path) -> list[Path]:
    names = [path.name for path in folder.glob("*.gguf") if is_mmproj(path.name) and path != model]
    return [folder / name for name in best_mmproj(names)]


def is_gguf(path: Path) -> bool:
    """Return True for a GGUF file. If the file does not have the suffix of a model file, its first bytes decide."""
    if path.name.endswith(_MODEL_SUFFIXES) or not path.is_file():
        return path.suffix == ".gguf"
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"
