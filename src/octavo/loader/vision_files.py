"""Checks whether a model has a vision part without opening it, because most models have none."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.loader.checkpoint import MAX_CONFIG_BYTES, Checkpoint
from octavo.loader.json_file import read_json_object
from octavo.loader.model_file import mmproj_files


def has_vision(checkpoint: Checkpoint, mmproj: str | None = None) -> bool:
    """Return True if a model has a vision part, or if the user names one, even if Octavo does not support it.

    mmproj: the vision file that the user names, valid or not; None to look for the model's own part, or for files next
        to it.

    Raises ModelLoadError.
    """
    if mmproj is not None:
        return True
    if checkpoint.format == "safetensors":
        config = read_json_object(checkpoint.path.parent / "config.json", MAX_CONFIG_BYTES)
        return isinstance(config.get("vision_config"), Mapping)
    return bool(mmproj_files(checkpoint.path))
