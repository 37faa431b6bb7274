"""SigLIP images: a square tile or, for SigLIP 2 with `naflex`, a tile of fixed area in the picture's aspect ratio."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from octavo.media.pixels import Normalization, patch_pixels, resized
from octavo.media.processor import ImageLayout, ImageProcessor, ImageTile, Picture
from octavo.media.settings import BICUBIC, BILINEAR, HALF, ImageSettings

if TYPE_CHECKING:
    from octavo.batch import Float32
    from octavo.media.processor import UInt8

MODEL_TYPES = ("siglip", "siglip2")

_PRECISION = 1e-5  # of a picture's scale


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SiglipImages(ImageProcessor):
    """SigLIP's image processor.

    side: side of the resized picture in pixels. Pixels beyond whole patches are left out.
    """

    placeholder: ClassVar[str] = ""
    gives_vectors: ClassVar[bool] = True

    side: int

    def layout(self, width: int, height: int) -> ImageLayout:
        patches = self.side // self.patch_size
        return ImageLayout(width, height, (ImageTile(patches, patches, 1),), (1,))

    def resize(self, picture: Picture, layout: ImageLayout) -> tuple[UInt8, ...]:
        seen = layout.tiles[0].grid_rows * self.patch_size
        return (resized(picture.pixels, self.side, self.side, self.resample)[:seen, :seen].copy(),)

    def limited(self, max_tokens: int) -> ImageProcessor:
        del max_tokens  # an image is one row
        return self


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NaflexImages(ImageProcessor):
    """The image processor of SigLIP 2 with `naflex`.

    most: maximum number of patches per tile
    """

    placeholder: ClassVar[str] = ""
    gives_vectors: ClassVar[bool] = True

    most: int

    def layout(self, width: int, height: int) -> ImageLayout:
        """Return the layout at the largest scale with at most `most` patches, using the published processor's
        search.
        """
        low, high = _PRECISION / 10, 100.0
        while high - low >= _PRECISION:
            scale = (low + high) / 2
            fits = self._patches(scale, height) * self._patches(scale, width) <= self.most
            low, high = (scale, high) if fits else (low, scale)
        return ImageLayout(width, height, (ImageTile(self._patches(low, height), self._patches(low, width), 1),), (1,))

    def rows(self, tiles: tuple[UInt8, ...]) -> Float32:
        return patch_pixels(tiles, self.patch_size, self.merge_size, self.normalization)

    def limited(self, max_tokens: int) -> ImageProcessor:
        del max_tokens  # an image is one row
        return self

    @property
    def max_patches(self) -> int:
        return self.most

    def _patches(self, scale: float, length: int) -> int:
        return max(1, math.ceil(length * scale / self.patch_size))


def read(settings: ImageSettings) -> ImageProcessor:
    patch_size = settings.side("patch_size", settings.vision("patch_size", 16))
    normalization = Normalization.of(*settings.statistics(HALF, HALF))
    if settings.model_type == "siglip2":
        return NaflexImages(
            settings=settings,
            most=settings.count("max_num_patches", 256, most=1 << 14),
            patch_size=patch_size,
            merge_size=1,
            resample=settings.resample(BILINEAR),
            normalization=normalization,
        )
    side = settings.vision("image_size", 224)
    size = settings.size("size", {"height": side, "width": side})
    if set(size.values()) != {side} or side < patch_size:
        settings.refuse("size", f"it must be the image_size of vision_config, {side} x {side} pixels")
    return SiglipImages(
        settings=settings,
        side=side,
        patch_size=patch_size,
        merge_size=1,
        resample=settings.resample(BICUBIC),
        normalization=normalization,
    )
