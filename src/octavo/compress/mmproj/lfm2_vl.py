"""The encoder of LFM2-VL as an mmproj file."""

from __future__ import annotations

from octavo.compress.forms._gguf import Keys
from octavo.compress.mmproj._form import MmprojForm
from octavo.media.families.lfm2_vl import Lfm2Images
from octavo.models.towers.lfm2_vl import Config


def _keys(cfg: Config, processor: Lfm2Images) -> Keys:
    return {"image_size": cfg.table_side * processor.patch_size, "projector.scale_factor": cfg.merge_size}


MMPROJ = MmprojForm(lambda _cfg: "lfm2", _keys)
