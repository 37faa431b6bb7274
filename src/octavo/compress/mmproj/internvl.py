"""The encoder of InternVL as an mmproj file."""

from __future__ import annotations

from octavo.compress.forms._gguf import Keys
from octavo.compress.mmproj._form import MmprojForm
from octavo.media.families.internvl import InternImages
from octavo.models.towers.internvl import Config


def _keys(cfg: Config, processor: InternImages) -> Keys:
    fewest, most = processor.bounds
    return {
        "image_size": processor.side,
        "preproc_min_tiles": fewest,
        "preproc_max_tiles": most,
        "projector.scale_factor": cfg.merge_size,
    }


MMPROJ = MmprojForm(lambda _cfg: "internvl", _keys)
