"""Images of the other families against transformers' processors, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.granite_docling.image_processing_pil_granite_docling import GraniteDoclingImageProcessorPil
from transformers.models.granite_docling.processing_granite_docling import GraniteDoclingProcessor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from octavo.media.families import lfm2_vl
from octavo.media.pictures import picture_of
from octavo.media.processor import ImageLayout, image_families, read_processor
from tests.support.pictures import SIZES, noise


@dataclass(frozen=True)
class Case:
    """judge: transformers' class. text: a processor's `self`, for the text of an image, with its class."""

    model_type: str
    judge: type[Any]
    preprocessor: dict[str, Any]
    config: dict[str, Any]
    text_class: type[Any]
    text: dict[str, Any]
    soft: str
    is_pixel_major: bool = False  # y, x, colour in a patch


class PixtralText:
    """The text of Pixtral's processor, whose module cannot be imported without torchvision."""

    def replace_image_token(self, outputs: Any, index: int) -> str:
        side: int = self.side  # type: ignore[attr-defined]
        height, width = outputs["image_sizes"][index]
        row = "[IMG]" * (width // side)
        return "[IMG_BREAK]".join([row] * (height // side)) + "[IMG_END]"


GEMMA = "\n\n<start_of_image>" + "<image_soft_token>" * 16 + "<end_of_image>\n\n"
IDEFICS = {
    "fake_image_token": "<fake_token_around_image>",
    "global_image_tag": "<global-img>",
    "image_token": "<image>",
    "image_seq_len": 16,
}
IDEFICS_SIZES = {"size": {"longest_edge": 256}, "max_image_size": {"longest_edge": 64}, "return_row_col_info": True}
IDEFICS_CONFIG = {"vision_config": {"patch_size": 8, "image_size": 64}, "scale_factor": 2}
DOCLING_CONFIG = {"vision_config": {"patch_size": 8, "image_size": 64, "scale_factor": 2}}
PAN = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 64,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
GEMMA_CONFIG = {"mm_tokens_per_image": 16, "vision_config": {"patch_size": 14}}

CASES: dict[str, Case] = {
    "gemma3": Case(
        "gemma3",
        Gemma3ImageProcessorPil,
        {"size": {"height": 224, "width": 224}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
        GEMMA_CONFIG,
        Gemma3Processor,
        {"full_image_sequence": GEMMA},
        "<image_soft_token>",
    ),
    "gemma3 with crops": Case(
        "gemma3",
        Gemma3ImageProcessorPil,
        {"size": {"height": 224, "width": 224}, **PAN},
        GEMMA_CONFIG,
        Gemma3Processor,
        {"full_image_sequence": GEMMA},
        "<image_soft_token>",
    ),
    "pixtral": Case(
        "llava",
        PixtralImageProcessorPil,
        {"size": {"longest_edge": 512}, "patch_size": {"height": 16, "width": 16}},
        {"vision_config": {"model_type": "pixtral", "patch_size": 16}},
        PixtralText,
        {"side": 16},
        "[IMG]",
    ),
    "mistral3": Case(
        "mistral3",
        PixtralImageProcessorPil,
        {"size": {"longest_edge": 616}, "patch_size": {"height": 28, "width": 28}},
        {"vision_config": {"patch_size": 14}, "spatial_merge_size": 2},
        PixtralText,
        {"side": 28},
        "[IMG]",
    ),
    "idefics3": Case(
        "idefics3", Idefics3ImageProcessorPil, IDEFICS_SIZES, IDEFICS_CONFIG, Idefics3Processor, IDEFICS, "<image>"
    ),
    "smolvlm": Case(
        "smolvlm", SmolVLMImageProcessorPil, IDEFICS_SIZES, IDEFICS_CONFIG, Idefics3Processor, IDEFICS, "<image>"
    ),
    "smolvlm in one tile": Case(
        "smolvlm",
        SmolVLMImageProcessorPil,
        {**IDEFICS_SIZES, "do_image_splitting": False},
        IDEFICS_CONFIG,
        Idefics3Processor,
        IDEFICS,
        "<image>",
    ),
    "granite-docling": Case(
        "granite_docling",
        GraniteDoclingImageProcessorPil,
        {"size": {"height": 64, "width": 64}, "max_patches": 9},
        DOCLING_CONFIG,
        GraniteDoclingProcessor,
        IDEFICS,
        "<image>",
    ),
    "granite-docling with dense pages": Case(
        "granite_docling",
        GraniteDoclingImageProcessorPil,
        {
            "size": {"height": 64, "width": 64},
            "max_patches": 4,
            "dense_max_patches": 20,
            "dense_max_scale": 0.9,
            "dense_min_aspect": 1.1,
        },
        DOCLING_CONFIG,
        GraniteDoclingProcessor,
        IDEFICS,
        "<image>",
    ),
    "internvl": Case(
        "internvl",
        GotOcr2ImageProcessorPil,
        {"size": {"height": 56, "width": 56}, "crop_to_patches": True, "max_patches": 12},
        {"vision_config": {"patch_size": [14, 14], "image_size": [56, 56]}, "downsample_ratio": 0.5},
        InternVLProcessor,
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "image_token": "<IMG_CONTEXT>",
            "image_seq_length": 4,
        },
        "<IMG_CONTEXT>",
    ),
    "gemma4": Case(
        "gemma4",
        Gemma4ImageProcessorPil,
        {"max_soft_tokens": 140},
        {},
        Gemma4Processor,
        {"boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>"},
        "<|image|>",
        is_pixel_major=True,
    ),
}


def in_blocks(pixels: np.ndarray[Any, Any], patch: int, merge: int, is_pixel_major: bool) -> np.ndarray[Any, Any]:
    """Rows of patches in the order of blocks, patch by patch, of float pixels [3, height, width]."""
    _, height, width = pixels.shape
    rows = []
    for top in range(0, height, patch * merge):
        for left in range(0, width, patch * merge):
            for y in range(top, top + patch * merge, patch):
                for x in range(left, left + patch * merge, patch):
                    part = pixels[:, y : y + patch, x : x + patch]
                    rows.append((part.transpose(1, 2, 0) if is_pixel_major else part).reshape(-1))
    return np.stack(rows)


def judged_rows(outputs: Any, layout: ImageLayout, case: Case, patch: int, merge: int) -> np.ndarray[Any, Any]:
    if case.model_type == "gemma4":  # gives rows in the order of the grid
        (tile,) = layout.tiles
        grid = outputs["pixel_values"][0][: tile.grid_rows * tile.grid_cols].reshape(tile.grid_rows, tile.grid_cols, -1)
        blocks = grid.reshape(tile.grid_rows // merge, merge, tile.grid_cols // merge, merge, -1)
        return np.asarray(blocks.transpose(0, 2, 1, 3, 4).reshape(-1, grid.shape[-1]))
    pixels = outputs["pixel_values"]
    tiles = pixels[0] if pixels[0].ndim == 4 else pixels
    assert len(tiles) == len(layout.tiles)
    return np.concatenate([in_blocks(tile, patch, merge, case.is_pixel_major) for tile in tiles])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", SIZES)
def test_rows_and_marks_equal_those_of_transformers(name: str, size: str) -> None:
    case, image = CASES[name], noise(*SIZES[size])
    outputs = case.judge(**case.preprocessor)([image], return_tensors="np")
    processor = read_processor(case.model_type, case.config, case.preprocessor)
    layout = processor.layout(*image.size)
    tiles = processor.resize(picture_of(image), layout)
    rows = processor.rows(tiles)
    wanted = judged_rows(outputs, layout, case, processor.patch_size, processor.merge_size)
    assert rows.shape == wanted.shape
    assert rows.tobytes() == np.ascontiguousarray(wanted, np.float32).tobytes()
    assert len(rows) == layout.num_tokens * processor.merge_size**2
    assert sum(mark for mark in layout.marks if isinstance(mark, int)) == layout.num_tokens
    text = "".join(mark if isinstance(mark, str) else case.soft * mark for mark in layout.marks)
    assert text == case.text_class.replace_image_token(SimpleNamespace(**case.text), outputs, 0)


@pytest.mark.parametrize("name", CASES)
def test_tiles_need_only_the_layout_and_have_its_size(name: str) -> None:
    case = CASES[name]
    processor = read_processor(case.model_type, case.config, case.preprocessor)
    for width, height in SIZES.values():
        layout = processor.layout(width, height)
        tiles = processor.resize(picture_of(noise(width, height)), layout)
        sizes = [
            (tile.grid_rows * processor.patch_size, tile.grid_cols * processor.patch_size) for tile in layout.tiles
        ]
        assert [tile.shape[:2] for tile in tiles] == sizes
        assert {tile.dtype.name for tile in tiles} == {"uint8"}


@pytest.mark.parametrize("model_type", image_families())
@pytest.mark.parametrize("limit", [1, 100, 700])
def test_a_limit_of_tokens_holds_or_is_the_fewest(model_type: str, limit: int) -> None:
    case = next((case for case in CASES.values() if case.model_type == model_type), None)
    processor = read_processor(model_type, case.config if case else {}, case.preprocessor if case else {})
    limited = processor.limited(limit)
    fewest = processor.limited(1)
    for width, height in SIZES.values():
        allowed = max(limit, fewest.layout(width, height).num_tokens)
        assert limited.layout(width, height).num_tokens <= min(allowed, processor.layout(width, height).num_tokens)


def test_lfm2_layouts_are_those_of_its_card() -> None:
    """The published processor needs torchvision, so these are its rule's values for sizes of each kind."""
    processor = read_processor("lfm2_vl", {}, {})
    assert lfm2_vl.MODEL_TYPES == ("lfm2_vl",)
    small = processor.layout(512, 512)
    assert small.marks == ("<|image_start|>", 256, "<|image_end|>")
    tiny = processor.layout(40, 40)
    assert (tiny.tiles[0].grid_rows, tiny.tiles[0].grid_cols, tiny.num_tokens) == (16, 16, 64)
    large = processor.layout(1536, 1024)
    tile_marks = [f"<|img_row_{row}_col_{col}|>" for row in (1, 2) for col in (1, 2, 3)]
    assert large.marks[0] == f"<|image_start|>{tile_marks[0]}"
    assert list(large.marks[2:12:2]) == tile_marks[1:]
    assert large.marks[-3] == "<|img_thumbnail|>"
    assert large.num_tokens == 6 * 256 + large.tiles[-1].num_tokens
    assert large.tiles[-1].num_tokens <= 256


@pytest.mark.parametrize("size", [*SIZES, "cut"])
def test_lfm2_rows_are_those_of_transformers_but_for_rounding(size: str) -> None:
    """Its processor resamples with torchvision, where a pixel may differ by one of 255."""
    pytest.importorskip("torchvision")
    from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor

    image = noise(*SIZES.get(size, (900, 1500)))
    outputs = Lfm2VlImageProcessor(return_row_col_info=True)([image], return_tensors="pt")
    processor = read_processor("lfm2_vl", {}, {})
    layout = processor.layout(*image.size)
    rows = processor.rows(processor.resize(picture_of(image), layout))
    start = 0
    assert [[tile.grid_rows, tile.grid_cols] for tile in layout.tiles] == outputs["spatial_shapes"].tolist()
    for tile, values in zip(layout.tiles, outputs["pixel_values"].numpy(), strict=True):
        grid = values[: tile.grid_rows * tile.grid_cols].reshape(tile.grid_rows // 2, 2, tile.grid_cols // 2, 2, -1)
        wanted = grid.transpose(0, 2, 1, 3, 4).reshape(tile.grid_rows * tile.grid_cols, -1)
        difference = np.abs(rows[start : start + len(wanted)] - wanted)
        assert difference.max() < 1.01 / 127.5
        start += len(wanted)
    assert start == len(rows)


@pytest.mark.parametrize("name", CASES)
def test_no_image_has_more_patches_than_the_processor_says(name: str) -> None:
    """The engine refuses an image beyond `max_patches`, so no shape may have more."""
    processor = read_processor(CASES[name].model_type, CASES[name].config, CASES[name].preprocessor)
    sides = (100, 300, 544, 630, 1000, 1080, 1200, 1440, 1920, 2560, 3440)
    for width, height in ((width, height) for width in sides for height in sides):
        assert processor.layout(width, height).num_patches <= processor.max_patches, (width, height)
