"""The encoder of Idefics 3 and SmolVLM as an mmproj file."""

from __future__ import annotations

from octavo.compress.forms._gguf import Keys
from octavo.compress.mmproj._form import MmprojForm
from octavo.media.families.idefics3 import IdeficsImages
from octavo.models.towers.idefics3 import Config


def _keys(cfg: Config, processor: IdeficsImages) -> Keys:
    return {
        "image_size": processor.side,
        "preproc_image_size": processor.longest_side,
        "projector.scale_factor": cfg.merge_size,
    }


MMPROJ = MmprojForm(lambda _cfg: "idefics3", _keys)
