"""InternVL 2 to 3.5 images: the grid of tiles closest to the picture's aspect ratio, with all tokens in one
sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from octavo.media.grids import closest_grid, tiles_of_grid
from octavo.media.pixels import Normalization
from octavo.media.processor import ImageLayout, ImageProcessor, Picture
from octavo.media.settings import BICUBIC, CLIP_MEAN, CLIP_STD, IMAGENET_MEAN, IMAGENET_STD, ImageSettings

if TYPE_CHECKING:
    from octavo.media.processor import UInt8

MODEL_TYPES = ("internvl", "internvl_chat")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class InternImages(ImageProcessor):
    """InternVL's image processor.

    side: side of a tile in pixels
    bounds: minimum and maximum number of tiles per picture
    """

    placeholder: ClassVar[str] = "<IMG_CONTEXT>"
    wrapping: ClassVar[tuple[str, str]] = ("", "\n")

    side: int
    bounds: tuple[int, int]

    def layout(self, width: int, height: int) -> ImageLayout:
        cols, rows = closest_grid(width, height, self.side, self.bounds)
        num_tiles = cols * rows + (cols * rows > 1)
        tile = self.square_tile(self.side)
        return ImageLayout(width, height, (tile,) * num_tiles, ("<img>", num_tiles * tile.num_tokens, "</img>"))

    def resize(self, picture: Picture, layout: ImageLayout) -> tuple[UInt8, ...]:
        grid = closest_grid(layout.width, layout.height, self.side, self.bounds)
        return tiles_of_grid(picture.pixels, self.side, grid, self.resample)

    def limited(self, max_tokens: int) -> ImageProcessor:
        num_tokens = self.square_tile(self.side).num_tokens
        most = max(1, min(self.bounds[1], max_tokens // num_tokens - 1))
        return read(self.settings.changed(max_patches=most, min_patches=min(self.bounds[0], most)))


def read(settings: ImageSettings) -> ImageProcessor:
    side = settings.vision("image_size", 448)
    is_own = settings.model_type == "internvl_chat"  # its preprocessor has no settings for tiles
    most = settings.side("max_patches", settings.text_count("max_dynamic_patch", 12))
    if is_own and settings.config.get("dynamic_image_size") is False:
        most = 1
    statistics = (IMAGENET_MEAN, IMAGENET_STD) if is_own else (CLIP_MEAN, CLIP_STD)
    ratio = settings.config.get("downsample_ratio")
    return InternImages(
        settings=settings,
        side=settings.size("size", {"height": side, "width": side})["height"],
        patch_size=settings.vision("patch_size", 14),
        merge_size=round(1 / ratio) if isinstance(ratio, int | float) and 0.01 < ratio <= 1 else 2,
        bounds=(min(settings.side("min_patches", settings.text_count("min_dynamic_patch", 1)), most), most),
        resample=settings.resample(BICUBIC),
        normalization=Normalization.of(*settings.statistics(*statistics)),
    )
