"""CLIP images: the centre of a picture whose shorter side is resized to the tile's side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from octavo.media.pixels import Normalization, resized
from octavo.media.processor import ImageLayout, ImageProcessor, ImageTile, Picture
from octavo.media.settings import BICUBIC, CLIP_MEAN, CLIP_STD, ImageSettings

if TYPE_CHECKING:
    from octavo.media.processor import UInt8

MODEL_TYPES = ("clip",)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ClipImages(ImageProcessor):
    """CLIP's image processor.

    side: side of the tile in pixels
    shorter: shorter side of the resized picture, or None to resize it to a square of `side`
    """

    placeholder: ClassVar[str] = ""
    gives_vectors: ClassVar[bool] = True

    side: int
    shorter: int | None

    def layout(self, width: int, height: int) -> ImageLayout:
        patches = self.side // self.patch_size
        return ImageLayout(width, height, (ImageTile(patches, patches, 1),), (1,))

    def resize(self, picture: Picture, layout: ImageLayout) -> tuple[UInt8, ...]:
        width, height = self._size(layout.width, layout.height)
        left, top = (width - self.side) // 2, (height - self.side) // 2
        seen = layout.tiles[0].grid_rows * self.patch_size
        pixels = resized(picture.pixels, width, height, self.resample)
        return (pixels[top : top + seen, left : left + seen].copy(),)

    def limited(self, max_tokens: int) -> ImageProcessor:
        del max_tokens  # an image is one row
        return self

    def _size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height of the resized picture."""
        if self.shorter is None:
            return self.side, self.side
        if width <= height:
            return self.shorter, int(self.shorter * height / width)
        return int(self.shorter * width / height), self.shorter


def read(settings: ImageSettings) -> ImageProcessor:
    side = settings.vision("image_size", 224)
    is_cropped = settings.flag("do_center_crop", True)
    crop = settings.size("crop_size", {"height": side, "width": side})
    stored = settings.preprocessor.get("size")
    keeps_shape = not isinstance(stored, Mapping) or "shortest_edge" in stored
    shorter = settings.size("size", {"shortest_edge": side})["shortest_edge"] if keeps_shape else None
    square = settings.size("size", {"height": side, "width": side}) if not keeps_shape else {}
    if is_cropped and (set(crop.values()) != {side} or (shorter is not None and shorter < side)):
        settings.refuse("crop_size", f"it must be the image_size of vision_config, {side}, and at most size")
    if (not is_cropped and keeps_shape) or (square and set(square.values()) != {side}):
        settings.refuse("size", f"the result must be a square of {side} pixels, the image_size of vision_config")
    return ClipImages(
        settings=settings,
        side=side,
        shorter=shorter,
        patch_size=settings.vision("patch_size", 32),
        merge_size=1,
        resample=settings.resample(BICUBIC),
        normalization=Normalization.of(*settings.statistics(CLIP_MEAN, CLIP_STD)),
    )
