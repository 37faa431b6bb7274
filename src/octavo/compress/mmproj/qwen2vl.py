"""The encoder of Qwen 2 VL and 2.5 VL as an mmproj file."""

from __future__ import annotations

from octavo.compress.forms._gguf import Keys
from octavo.compress.mmproj._form import MmprojForm
from octavo.media.families.qwen_vl import QwenImages
from octavo.models.towers.qwen2vl import Config

_IMAGE_SIZE = 560  # llama.cpp requires this key and ignores it


def _keys(cfg: Config, processor: QwenImages) -> Keys:
    keys: Keys = {
        "image_size": _IMAGE_SIZE,
        "image_min_pixels": processor.least_pixels,
        "image_max_pixels": processor.most_pixels,
        "spatial_merge_size": cfg.merge_size,
    }
    if cfg.window:
        keys |= {
            "n_wa_pattern": 1 + min(cfg.full_layers, default=cfg.num_layers),
            "window_size": cfg.window * cfg.merge_size * processor.patch_size,
        }
    return keys


MMPROJ = MmprojForm(lambda cfg: "qwen2.5vl_merger" if cfg.window else "qwen2vl_merger", _keys)
