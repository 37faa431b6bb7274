"""Gemma 3 images: one square tile and, if the settings enable it, crops of elongated pictures ("pan and scan")."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from octavo.errors import ModelLoadError
from octavo.media.pixels import Normalization, resized
from octavo.media.processor import ImageLayout, ImageProcessor, Picture
from octavo.media.settings import BILINEAR, HALF, ImageSettings

if TYPE_CHECKING:
    from octavo.media.processor import UInt8

MODEL_TYPES = ("gemma3",)

_BEGIN, _END = "\n\n<start_of_image>", "<end_of_image>\n\n"


@dataclass(frozen=True, slots=True)
class CropRule:
    """The rule for cropping elongated pictures.

    ratio: ratio of the longer to the shorter side above which a picture is cropped
    least_side: minimum side of a crop in pixels
    most: maximum number of crops
    """

    ratio: float
    least_side: int
    most: int

    def boxes(self, width: int, height: int) -> list[tuple[int, int, int, int]]:
        """Return (left, top, right, bottom) of each crop, or [] if the picture is not cropped."""
        long, short = max(width, height), min(width, height)
        if long / short < self.ratio:
            return []
        count = min(math.floor(long / self.least_side), math.floor(long / short + 0.5))
        count = min(self.most, max(2, count))
        step = math.ceil(long / count)
        if min(step, short) < self.least_side:
            return []
        starts = [step * i for i in range(count)]
        if width >= height:
            return [(start, 0, min(start + step, width), height) for start in starts]
        return [(0, start, width, min(start + step, height)) for start in starts]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Gemma3Images(ImageProcessor):
    """Gemma 3's image processor.

    side: side of a tile in pixels
    crops: the rule for crops, or None to never crop pictures
    """

    placeholder: ClassVar[str] = "<start_of_image>"

    side: int
    crops: CropRule | None

    def layout(self, width: int, height: int) -> ImageLayout:
        num_crops = len(self.crops.boxes(width, height)) if self.crops else 0
        tile = self.square_tile(self.side)
        marks: tuple[str | int, ...] = (_BEGIN, tile.num_tokens, _END)
        if num_crops:
            crops = [(" " + _BEGIN if i else _BEGIN, tile.num_tokens, _END) for i in range(num_crops)]
            about = ("Here is the original image ", *marks, " and here are some crops to help you see better ")
            marks = (*about, *(mark for crop in crops for mark in crop))
        return ImageLayout(width, height, (tile,) * (1 + num_crops), marks)

    def resize(self, picture: Picture, layout: ImageLayout) -> tuple[UInt8, ...]:
        boxes = self.crops.boxes(layout.width, layout.height) if self.crops else []
        parts = [picture.pixels, *(picture.pixels[top:bottom, left:right] for left, top, right, bottom in boxes)]
        return tuple(resized(part, self.side, self.side, self.resample) for part in parts)

    def limited(self, max_tokens: int) -> ImageProcessor:
        del max_tokens  # without crops, the number of tokens is fixed
        return read(self.settings.changed(do_pan_and_scan=False))


def read(settings: ImageSettings) -> ImageProcessor:
    side = settings.vision("image_size", 896)
    size = settings.size("size", {"height": side, "width": side})
    patch_size = settings.vision("patch_size", 14)
    tokens_per_side = math.isqrt(settings.text_count("mm_tokens_per_image", 256))
    side, patches = size["height"], size["height"] // patch_size
    if size["width"] != side or side % patch_size or patches % tokens_per_side:
        raise ModelLoadError(
            f"the settings of images: {size['height']} x {size['width']} pixels cannot be cut into patches of "
            f"{patch_size} and {tokens_per_side} x {tokens_per_side} tokens"
        )
    crops = CropRule(
        settings.number("pan_and_scan_min_ratio_to_activate", 1.2),
        settings.side("pan_and_scan_min_crop_size", 256),
        settings.side("pan_and_scan_max_num_crops", 4),
    )
    return Gemma3Images(
        settings=settings,
        side=side,
        patch_size=patch_size,
        merge_size=patches // tokens_per_side,
        resample=settings.resample(BILINEAR),
        crops=crops if settings.flag("do_pan_and_scan", False) else None,
        normalization=Normalization.of(*settings.statistics(HALF, HALF)),
    )
