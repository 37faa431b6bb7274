"""Images of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen 3.5: one tile of any size, kept in shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from octavo.errors import UsageError
from octavo.media.pixels import Normalization, blocks, normalized
from octavo.media.processor import ImageLayout, ImageProcessor, ImageTile
from octavo.media.settings import BICUBIC, CLIP_MEAN, CLIP_STD, HALF, ImageSettings

if TYPE_CHECKING:
    from octavo.batch import Float32
    from octavo.media.processor import UInt8

MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")

_MAX_RATIO = 200
_NUM_FRAMES = 2  # of a still picture both are the same


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class QwenImages(ImageProcessor):
    """num_frames: of a patch. least_pixels, most_pixels: bounds of the resized picture."""

    placeholder: ClassVar[str] = "<|image_pad|>"
    wrapping: ClassVar[tuple[str, str]] = ("<|vision_start|>", "<|vision_end|>")

    num_frames: int
    least_pixels: int
    most_pixels: int

    @property
    def max_patches(self) -> int:
        return self.most_pixels // self.patch_size**2

    def layout(self, width: int, height: int) -> ImageLayout:
        if max(width, height) > _MAX_RATIO * min(width, height):
            raise UsageError(
                f"is {width} x {height} pixels: one side is more than {_MAX_RATIO} times the other, which "
                "this model cannot take; crop it",
                code="image_too_narrow",
            )
        new_height, new_width = self._fitted(height, width)
        rows, cols = new_height // self.patch_size, new_width // self.patch_size
        tile = ImageTile(rows, cols, rows * cols // self.merge_size**2)
        return ImageLayout(width, height, (tile,), (tile.num_tokens,))

    def rows(self, tiles: tuple[UInt8, ...]) -> Float32:
        patches = normalized(blocks(tiles[0], self.patch_size, self.merge_size), self.normalization)
        frames = np.broadcast_to(patches[:, :, None], (*patches.shape[:2], self.num_frames, *patches.shape[2:]))
        return frames.reshape(len(patches), -1)

    def limited(self, max_tokens: int) -> ImageProcessor:
        pixels = max_tokens * (self.patch_size * self.merge_size) ** 2
        return read(self.settings.changed(max_pixels=max(self.least_pixels, min(pixels, self.most_pixels))))

    def _fitted(self, height: int, width: int) -> tuple[int, int]:
        """The sides as multiples of a block's side, their product within bounds, about in the same ratio."""
        side = self.patch_size * self.merge_size
        new_height, new_width = round(height / side) * side, round(width / side) * side  # halves to even numbers
        if new_height * new_width > self.most_pixels:
            shrink = math.sqrt((height * width) / self.most_pixels)
            new_height = max(side, math.floor(height / shrink / side) * side)
            new_width = max(side, math.floor(width / shrink / side) * side)
        elif new_height * new_width < self.least_pixels:
            grow = math.sqrt(self.least_pixels / (height * width))
            new_height = math.ceil(height * grow / side) * side
            new_width = math.ceil(width * grow / side) * side
        return new_height, new_width


def read(settings: ImageSettings) -> ImageProcessor:
    is_second = settings.model_type.startswith("qwen2")
    bounds = settings.size(
        "size",
        {"shortest_edge": 56 * 56 if is_second else 1 << 16, "longest_edge": 28 * 28 * 1280 if is_second else 1 << 24},
        most=1 << 28,
    )
    mean, std = (CLIP_MEAN, CLIP_STD) if is_second else (HALF, HALF)
    return QwenImages(
        settings=settings,
        patch_size=settings.side("patch_size", settings.vision("patch_size", 14 if is_second else 16)),
        merge_size=settings.side("merge_size", settings.vision("spatial_merge_size", 2)),
        num_frames=settings.side("temporal_patch_size", settings.vision("temporal_patch_size", _NUM_FRAMES)),
        least_pixels=settings.count("min_pixels", bounds["shortest_edge"]),
        most_pixels=settings.count("max_pixels", bounds["longest_edge"]),
        resample=settings.resample(BICUBIC),
        normalization=Normalization.of(*settings.statistics(mean, std)),
    )
