"""The encoder of Qwen 3 VL and 3.5 as an mmproj file."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from octavo.compress.forms._gguf import Keys, Sources
from octavo.compress.mmproj._form import MmprojForm
from octavo.media.families.qwen_vl import QwenImages
from octavo.models.towers.qwen3vl import Config


def _keys(cfg: Config, processor: QwenImages) -> Keys:
    taken = [layer for layer, _ in cfg.deepstack]
    return {
        "image_size": cfg.table_side * processor.patch_size,
        "image_min_pixels": processor.least_pixels,
        "image_max_pixels": processor.most_pixels,
        "spatial_merge_size": cfg.merge_size,
        "is_deepstack_layers": np.isin(np.arange(cfg.num_layers), taken),
    }


def _by_layer(cfg: Config, weights: Sources) -> tuple[Config, Sources]:
    """Give each of DeepStack's mergers the number of the layer that it follows, as mmproj files do."""
    layers = {str(number): str(layer) for layer, number in cfg.deepstack}
    found = {}
    for name, source in weights.items():
        first, *rest = name.split(".")
        if first == "deepstack":
            rest[0] = layers[rest[0]]
        found[".".join([first, *rest])] = source
    return replace(cfg, deepstack=tuple((layer, layer) for layer, _ in cfg.deepstack)), found


MMPROJ = MmprojForm(lambda _cfg: "qwen3vl_merger", _keys, _by_layer)
