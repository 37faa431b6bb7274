"""Reads an adapter for a model from a PEFT folder, a GGUF file or a checkpoint with task adapters."""

from __future__ import annotations

from pathlib import Path

from octavo.adapters.adapter import Adapter, AdapterBase
from octavo.adapters.gguf import read_gguf
from octavo.adapters.magnitudes import with_gains
from octavo.adapters.peft import CONFIG_NAME, WEIGHTS_NAME, read_peft
from octavo.adapters.placing import placed
from octavo.adapters.tasks import CONFIG_NAME as TASKS_NAME
from octavo.adapters.tasks import has_tasks, read_task
from octavo.errors import ModelLoadError
from octavo.loader.model_file import find_model_file

Stamps = tuple[tuple[str, int, int, int], ...]


def read_adapter(path: Path, base: AdapterBase, name: str = "", scale: float = 1.0) -> Adapter:
    """Return the adapter in a folder or GGUF file, for a base of either format.

    scale: multiplies its effect.
    name: in a checkpoint with task adapters, selects the task of this name.
    Raises ModelLoadError naming the tensor or key that does not fit the model or is not supported.
    """
    try:
        path = _found(path)
        is_folder = path.is_dir()
        if is_folder and not (path / CONFIG_NAME).is_file():
            stored = read_task(path, base, name)
        else:
            stored = read_peft(path, base) if is_folder else read_gguf(path, base)
    except OSError as error:
        raise ModelLoadError(f"{path}: {error.strerror}") from error
    try:
        parts = with_gains(placed(stored.parts, base, "safetensors" if is_folder else "gguf"), base)
        return Adapter.of(name or path.stem, parts, scale, stored.invocation_tokens)
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from error


def files_of(path: Path) -> list[Path]:
    """Return the files that an adapter consists of. Raises ModelLoadError if there are none."""
    path = _found(path)
    if path.is_dir() and not (path / CONFIG_NAME).is_file():
        return [path / TASKS_NAME, find_model_file(path)]
    names = (CONFIG_NAME, WEIGHTS_NAME)
    return [path / name for name in names if (path / name).is_file()] if path.is_dir() else [path]


def stamps_of(path: Path) -> Stamps:
    """Return each file's name, size in bytes, modification time in ns and inode. If a file has changed, its values
    differ.

    Raises ModelLoadError.
    """
    try:
        found = [(file.name, file.stat()) for file in files_of(path)]
    except OSError as error:
        raise ModelLoadError(f"{path}: {error.strerror}") from error
    return tuple((name, status.st_size, status.st_mtime_ns, status.st_ino) for name, status in found)


def _found(path: Path) -> Path:
    """Return the folder of PEFT's files, or the GGUF file."""
    if path.name in (CONFIG_NAME, WEIGHTS_NAME):
        path = path.parent
    if not path.is_dir():
        if not path.is_file():
            raise ModelLoadError(f"{path}: no such file or directory")
        return path
    if (path / CONFIG_NAME).is_file() or has_tasks(path):
        return path
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) != 1:
        raise ModelLoadError(f"{path}: not an adapter; a folder needs {CONFIG_NAME} or one GGUF file")
    return ggufs[0]
