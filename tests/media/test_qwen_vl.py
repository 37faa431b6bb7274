"""Images of the Qwen family against transformers' processor, bit for bit."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from octavo.errors import ModelLoadError, UsageError
from octavo.media.digest import content_digest
from octavo.media.pictures import picture_of
from octavo.media.processor import ImageProcessor, read_processor
from tests.support.pictures import SIZES, files, noise

SETTINGS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"min_pixels": 56 * 56, "max_pixels": 640 * 480},
    "qwen3_vl": {
        "size": {"shortest_edge": 65536, "longest_edge": 800 * 600},
        "patch_size": 16,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
}


def both(model_type: str) -> tuple[ImageProcessor, Qwen2VLImageProcessorPil]:
    judge = Qwen2VLImageProcessorPil(**SETTINGS[model_type])
    return read_processor(model_type, {}, SETTINGS[model_type]), judge


def check(processor: ImageProcessor, judge: Qwen2VLImageProcessorPil, image: Image.Image) -> None:
    wanted = judge([image], return_tensors="np")
    layout = processor.layout(*image.size)
    rows = processor.rows(processor.resize(picture_of(image), layout))
    (tile,) = layout.tiles
    assert [1, tile.grid_rows, tile.grid_cols] == wanted["image_grid_thw"][0].tolist()
    assert tile.num_tokens * 4 == len(wanted["pixel_values"]) == len(rows)
    assert layout.marks == (tile.num_tokens,)
    assert rows.dtype == np.float32
    assert rows.tobytes() == np.ascontiguousarray(wanted["pixel_values"]).tobytes()


@pytest.mark.parametrize("model_type", SETTINGS)
@pytest.mark.parametrize("size", SIZES)
def test_rows_equal_those_of_transformers(model_type: str, size: str) -> None:
    check(*both(model_type), noise(*SIZES[size]))


@pytest.mark.parametrize("name", files())
def test_files_of_every_kind_give_the_same_rows(name: str) -> None:
    processor, judge = both("qwen3_vl")
    judged = judge([ImageOps.exif_transpose(Image.open(io.BytesIO(files()[name])))], return_tensors="np")
    picture = picture_of(Image.open(io.BytesIO(files()[name])))
    assert picture.pixels.shape == ((90, 61, 3) if "turned" in name else (61, 90, 3))
    layout = processor.layout(picture.width, picture.height)
    rows = processor.rows(processor.resize(picture, layout))
    assert rows.tobytes() == np.ascontiguousarray(judged["pixel_values"]).tobytes()


def test_sizes_at_exact_halves_are_those_of_transformers() -> None:
    processor, judge = both("qwen3_vl")
    for width, height in [(16, 48), (48, 80), (80, 1000), (1000, 1001), (33, 6000), (6400, 32), (4000, 3000)]:
        layout = processor.layout(width, height)
        assert layout.tiles[0].num_tokens * 4 == judge.get_number_of_image_patches(height, width)


def test_a_picture_that_is_too_narrow_is_refused() -> None:
    processor, _ = both("qwen3_vl")
    processor.layout(2000, 10)
    with pytest.raises(UsageError, match="2010 x 10 pixels: one side is more than 200 times the other"):
        processor.layout(2010, 10)


def test_settings_that_are_wrong_are_named() -> None:
    for wrong, named in [
        ({"patch_size": 0}, "patch_size is 0"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std"),
        ({"resample": 9}, "resample is 9"),
        ({"size": "big"}, "size is 'big'"),
        ({"do_resize": False}, "do_resize"),
    ]:
        with pytest.raises(ModelLoadError, match=named):
            read_processor("qwen3_vl", {}, wrong)
    with pytest.raises(ModelLoadError, match="images of 'llama' cannot be read"):
        read_processor("llama", {}, {})


def test_a_digest_depends_on_all_that_rows_depend_on() -> None:
    processor, other = read_processor("qwen3_vl", {}, {}), read_processor("qwen3_vl", {}, {"max_pixels": 100000})
    digests = {
        content_digest("image", b"ab", processor),
        content_digest("image", b"ab", other),
        content_digest("image", b"ac", processor),
        content_digest("video", b"ab", processor),
    }
    assert len(digests) == 4
    assert content_digest("image", b"ab", read_processor("qwen3_vl", {}, {})) in digests
