"""Checks whether a model has a vision part, without reading it: most models have none."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.loader.checkpoint import MAX_CONFIG_BYTES, Checkpoint
from octavo.loader.json_file import read_json_object
from octavo.loader.model_file import mmproj_files


def has_vision(checkpoint: Checkpoint, mmproj: str | None = None) -> bool:
    """True if there is a vision part or one is named, even if Octavo does not support it. Raises ModelLoadError.

    mmproj: the given vision file, valid or not; None for the model's own, or those next to it.
    """
    if mmproj is not None:
        return True
    if checkpoint.format == "safetensors":
        config = read_json_object(checkpoint.path.parent / "config.json", MAX_CONFIG_BYTES)
        return isinstance(config.get("vision_config"), Mapping)
    return bool(mmproj_files(checkpoint.path))
