"""Picks the model's file in a directory."""

from __future__ import annotations

from pathlib import Path

from octavo.errors import ModelLoadError
from octavo.loader.gguf import part_paths

INDEX_NAME = "model.safetensors.index.json"
_PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
_MODEL_SUFFIXES = (".gguf", ".safetensors", ".safetensors.index.json")


def find_model_file(path: Path) -> Path:
    """The file to open for a model given as file or directory.

    It is a GGUF file (the first part of a split one), or a safetensors file or the index of a sharded one with
    `config.json` beside it. Raises ModelLoadError if there is none or the choice is ambiguous.
    """
    try:
        if not path.is_dir():
            if not path.exists() and not path.is_symlink():
                raise ModelLoadError(f"{path}: no such file or directory")
            _refuse_unknown(path)
            return path
        names = sorted(p.name for p in path.iterdir())
    except OSError as error:
        raise ModelLoadError(f"{path}: {error.strerror}") from error
    if INDEX_NAME in names:
        return path / INDEX_NAME
    safetensors = [path / name for name in names if name.endswith(".safetensors")]
    if "config.json" in names and len(safetensors) == 1:
        return safetensors[0]
    models = {part_paths(path / name)[0] for name in names if name.endswith(".gguf")}
    if len(models) == 1 and not safetensors:
        return models.pop()
    found = sorted(p.name for p in [*models, *safetensors])
    if safetensors and "config.json" not in names:
        raise ModelLoadError(f"{path / 'config.json'}: no such file; safetensors models need it")
    if found:
        raise ModelLoadError(f"{path}: {len(found)} models; name one of them: {', '.join(found[:10])}")
    if any(Path(name).suffix in _PICKLE_SUFFIXES for name in names):
        raise ModelLoadError(f"{path}: pickle checkpoints are not supported; convert to safetensors or GGUF")
    raise ModelLoadError(f"{path}: no model in this directory; a .gguf or .safetensors file is needed")


def is_gguf(path: Path) -> bool:
    """True if the file is GGUF, by its suffix or, with another suffix, by its first bytes."""
    if path.name.endswith(_MODEL_SUFFIXES) or not path.is_file():
        return path.suffix == ".gguf"
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _refuse_unknown(path: Path) -> None:
    if path.name.endswith(_MODEL_SUFFIXES) or is_gguf(path):
        return
    if path.suffix in _PICKLE_SUFFIXES:
        raise ModelLoadError(f"{path}: pickle checkpoints are not supported; convert to safetensors or GGUF")
    raise ModelLoadError(f"{path}: not a model; a .gguf or .safetensors file is needed")
