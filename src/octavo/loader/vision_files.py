"""Finds the part of a model that sees, without reading it: most models have none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from octavo.errors import ModelLoadError
from octavo.loader.checkpoint import MAX_CONFIG_BYTES, Checkpoint
from octavo.loader.json_file import read_json_object

MMPROJ = "mmproj"  # in the name of a file


def has_vision(checkpoint: Checkpoint, mmproj: str | None = None) -> bool:
    """True if a part that sees is there or named, which Octavo may not know. Raises ModelLoadError.

    mmproj: its file, of a GGUF model; None: the one beside it.
    """
    if checkpoint.format == "safetensors":
        config = read_json_object(checkpoint.path.parent / "config.json", MAX_CONFIG_BYTES)
        return isinstance(config.get("vision_config"), Mapping)
    return mmproj is not None or find_mmproj(checkpoint.path) is not None


def find_mmproj(model: Path) -> Path | None:
    """The file with the part that sees beside a GGUF file. Raises ModelLoadError if there are several."""
    found = sorted(path for path in model.parent.glob("*.gguf") if MMPROJ in path.name.lower() and path != model)
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ModelLoadError(
            f"{model.parent}: {len(found)} files may be the part that sees: name one with --mmproj: {names}"
        )
    return found[0] if found else None
