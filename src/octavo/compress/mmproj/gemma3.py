"""The encoder of Gemma 3 as an mmproj file."""

from __future__ import annotations

from octavo.compress.forms._gguf import Keys
from octavo.compress.mmproj._form import MmprojForm
from octavo.media.families.gemma3 import Gemma3Images
from octavo.models.towers.gemma3 import Config


def _keys(cfg: Config, processor: Gemma3Images) -> Keys:
    return {"image_size": processor.side, "projector.scale_factor": cfg.merge_size}


MMPROJ = MmprojForm(lambda _cfg: "gemma3", _keys)
