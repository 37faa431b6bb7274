"""The encoders of Gemma 4 as mmproj files, where the values of a patch are ordered by colour."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from octavo.compress.forms._gguf import Keys, Sources
from octavo.compress.mmproj._form import MmprojForm
from octavo.loader import source_changes
from octavo.loader.transforms import transformed
from octavo.media.families.gemma4 import Gemma4Images
from octavo.models._weights import Permute, PermuteColumns
from octavo.models.towers.gemma4 import Config

_IMAGE_SIZE = 224  # llama.cpp requires this key and ignores it
_TABLE = "places.weight"


def _by_colour(cfg: Config) -> NDArray[np.intp]:
    order: NDArray[np.intp] = np.arange(cfg.patch_values).reshape(-1, 3).T.reshape(-1)
    return order


_STEPS = (PermuteColumns("patch_dense", _by_colour), Permute("patch_ln1", _by_colour))


def _keys(cfg: Config, processor: Gemma4Images) -> Keys:
    del cfg
    return {
        "image_size": _IMAGE_SIZE,
        "patch_size": processor.settings.side("patch_size", 16),
        "projector.scale_factor": processor.settings.side("pooling_kernel_size", 3),
    }


def _stored(cfg: Config, weights: Sources) -> tuple[Config, Sources]:
    found = transformed(weights, _STEPS, cfg, "gguf")
    if not cfg.num_layers:
        found[_TABLE] = source_changes.first_exchanged(found[_TABLE])
    return replace(cfg, is_planar=True, bounds={}), found


MMPROJ = MmprojForm(
    lambda cfg: "gemma4v" if cfg.num_layers else "gemma4uv",
    _keys,
    _stored,
    projector_key="clip.vision.projector_type",
)
