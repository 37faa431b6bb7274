"""Images of CLIP, SigLIP and SigLIP 2 against transformers' processors, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

from octavo.errors import ModelLoadError
from octavo.media.pictures import picture_of
from octavo.media.processor import read_processor
from tests.support.pictures import SIZES, noise

CASES: dict[str, tuple[str, type[Any], dict[str, Any], dict[str, Any]]] = {
    "clip": ("clip", CLIPImageProcessorPil, {}, {}),
    "clip in numbers": ("clip", CLIPImageProcessorPil, {"size": 224, "crop_size": 224}, {}),
    "clip with a margin": ("clip", CLIPImageProcessorPil, {"size": {"shortest_edge": 257}}, {}),
    "clip of squares": (
        "clip",
        CLIPImageProcessorPil,
        {"size": {"height": 224, "width": 224}, "do_center_crop": False},
        {},
    ),
    "siglip": ("siglip", SiglipImageProcessorPil, {"resample": 3}, {}),
    "siglip of 384": (
        "siglip",
        SiglipImageProcessorPil,
        {"size": {"height": 384, "width": 384}},
        {"vision_config": {"image_size": 384, "patch_size": 14}},
    ),
    "siglip2": ("siglip2", Siglip2ImageProcessorPil, {}, {}),
    "siglip2 of 1024": ("siglip2", Siglip2ImageProcessorPil, {"max_num_patches": 1024}, {}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", SIZES)
def test_rows_equal_those_of_transformers(name: str, size: str) -> None:
    model_type, judge, preprocessor, config = CASES[name]
    image = noise(*SIZES[size])
    outputs = judge(**preprocessor)([image], return_tensors="np")
    processor = read_processor(model_type, config, preprocessor)
    layout = processor.layout(*image.size)
    (tile,) = layout.tiles
    rows = processor.rows(processor.resize(picture_of(image), layout))
    patch = processor.patch_size
    if model_type == "siglip2":
        assert [tile.grid_rows, tile.grid_cols] == outputs["spatial_shapes"][0].tolist()
        wanted = outputs["pixel_values"][0][: tile.grid_rows * tile.grid_cols]
    else:
        pixels = outputs["pixel_values"][0][:, : tile.grid_rows * patch, : tile.grid_cols * patch]
        grid = pixels.reshape(3, tile.grid_rows, patch, tile.grid_cols, patch).transpose(1, 3, 0, 2, 4)
        wanted = grid.reshape(len(rows), -1)
    assert rows.tobytes() == np.ascontiguousarray(wanted, np.float32).tobytes()
    assert layout.num_tokens == 1
    assert len(rows) <= processor.max_patches


@pytest.mark.parametrize(
    ("model_type", "preprocessor", "key"),
    [
        ("clip", {"crop_size": 240}, "crop_size"),
        ("clip", {"size": {"shortest_edge": 200}}, "crop_size"),
        ("clip", {"do_center_crop": False}, "size"),
        ("clip", {"size": {"height": 240, "width": 240}}, "size"),
        ("clip", {"size": 224.0}, "size"),
        ("siglip", {"size": {"height": 240, "width": 224}}, "size"),
    ],
)
def test_sizes_that_do_not_fit_the_encoder_are_refused(model_type: str, preprocessor: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"preprocessor_config.json: {key} is"):
        read_processor(model_type, {}, preprocessor)
