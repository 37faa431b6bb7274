"""Pixtral, Mistral Small 3.x and Ministral 3 images: one tile of any size, with a mark after each row of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from octavo.errors import ModelLoadError
from octavo.media.pixels import Normalization
from octavo.media.processor import ImageLayout, ImageProcessor, ImageTile
from octavo.media.settings import BICUBIC, CLIP_MEAN, CLIP_STD, ImageSettings

MODEL_TYPES = ("mistral3", "pixtral", "llava")  # llava if its vision part is `pixtral`


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PixtralImages(ImageProcessor):
    """Pixtral's image processor.

    longest_side: longest side of a resized picture in pixels, before it is padded to whole tokens
    """

    placeholder: ClassVar[str] = "[IMG]"

    longest_side: int

    def layout(self, width: int, height: int) -> ImageLayout:
        ratio = max(height / self.longest_side, width / self.longest_side)
        if ratio > 1:
            width_in, height_in = max(1, math.floor(width / ratio)), max(1, math.floor(height / ratio))
        else:
            width_in, height_in = width, height
        side = self.patch_size * self.merge_size
        rows, cols = (height_in - 1) // side + 1, (width_in - 1) // side + 1
        tile = ImageTile(rows * self.merge_size, cols * self.merge_size, rows * cols)
        marks = [mark for _ in range(rows) for mark in (cols, "[IMG_BREAK]")]
        return ImageLayout(width, height, (tile,), (*marks[:-1], "[IMG_END]"))

    def limited(self, max_tokens: int) -> ImageProcessor:
        side = self.patch_size * self.merge_size
        longest = max(side, math.isqrt(max_tokens) * side)
        return read(self.settings.changed(size={"longest_edge": min(longest, self.longest_side)}))


def read(settings: ImageSettings) -> ImageProcessor:
    vision = settings.config.get("vision_config") or {}
    if settings.model_type == "llava" and vision.get("model_type", "pixtral") != "pixtral":
        raise ModelLoadError(
            f"images of a llava model with a vision part {vision.get('model_type')!r:.80} cannot be read; only "
            "pixtral is supported"
        )
    is_merged = settings.model_type == "mistral3"
    stored = settings.preprocessor.get("patch_size")
    stored = stored.get("height") if isinstance(stored, Mapping) else stored
    patch_size = settings.vision("patch_size", stored if isinstance(stored, int) else 14 if is_merged else 16)
    merge_size = settings.text_count("spatial_merge_size", 2 if is_merged else 1)
    return PixtralImages(
        settings=settings,
        patch_size=patch_size,
        merge_size=merge_size,
        longest_side=settings.size("size", {"longest_edge": 1540 if is_merged else 1024})["longest_edge"],
        resample=settings.resample(BICUBIC),
        normalization=Normalization.of(*settings.statistics(CLIP_MEAN, CLIP_STD)),
    )
