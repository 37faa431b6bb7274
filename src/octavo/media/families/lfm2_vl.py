"""LFM2-VL images: one tile of any size, or for larger pictures a grid of tiles and a small copy of the whole
picture.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from octavo.media.grids import closest_grid, cut
from octavo.media.pixels import Normalization, patch_pixels, resized
from octavo.media.processor import ImageLayout, ImageProcessor, ImageTile, Picture
from octavo.media.settings import BILINEAR, HALF, ImageSettings

if TYPE_CHECKING:
    from octavo.batch import Float32
    from octavo.media.processor import UInt8

MODEL_TYPES = ("lfm2_vl",)


@dataclass(frozen=True, slots=True)
class TileRule:
    """The rule for splitting large pictures.

    side: side of a tile in pixels
    bounds: minimum and maximum number of tiles
    tolerance: factor by which one tile may exceed its pixel limit before the picture is split
    has_whole: whether a small copy of the whole picture follows the tiles
    """

    side: int
    bounds: tuple[int, int]
    tolerance: float
    has_whole: bool


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Lfm2Images(ImageProcessor):
    """LFM2-VL's image processor.

    least_tokens, most_tokens: bounds on the tokens of a tile that shows a whole picture
    tiles: the rule for splitting, or None to never split pictures

    The published processor resamples with torchvision, whose rounding differs. This one uses Pillow, like all families
    here.
    """

    placeholder: ClassVar[str] = "<image>"

    least_tokens: int
    most_tokens: int
    tiles: TileRule | None

    def layout(self, width: int, height: int) -> ImageLayout:
        whole = self._whole_tile(width, height)
        if self.tiles is None or not self._is_large(width, height):
            marks: list[str | int] = ["<|image_start|>", whole.num_tokens, "<|image_end|>"]
            return ImageLayout(width, height, (whole,), tuple(marks))
        cols, rows = closest_grid(width, height, self.tiles.side, self.tiles.bounds)
        patches = self.tiles.side // self.patch_size
        tile = ImageTile(patches, patches, math.ceil(patches / self.merge_size) ** 2)
        num_tiles, has_whole = cols * rows, self.tiles.has_whole and cols * rows > 1
        marks = []
        for i in range(num_tiles):
            name = f"<|img_row_{i // cols + 1}_col_{i % cols + 1}|>" if num_tiles > 1 else ""
            marks += [f"{'' if i else '<|image_start|>'}{name}", tile.num_tokens]
        if has_whole:
            marks += ["<|img_thumbnail|>", whole.num_tokens]
        return ImageLayout(width, height, (*(tile,) * num_tiles, *(whole,) * has_whole), (*marks, "<|image_end|>"))

    def resize(self, picture: Picture, layout: ImageLayout) -> tuple[UInt8, ...]:
        whole = self._whole_tile(layout.width, layout.height)
        size = whole.grid_cols * self.patch_size, whole.grid_rows * self.patch_size
        if self.tiles is None or not self._is_large(layout.width, layout.height):
            return (resized(picture.pixels, *size, self.resample),)
        side = self.tiles.side
        cols, rows = closest_grid(layout.width, layout.height, side, self.tiles.bounds)
        parts = tuple(cut(resized(picture.pixels, cols * side, rows * side, self.resample), side))
        if len(parts) == len(layout.tiles):
            return parts
        return (*parts, resized(picture.pixels, *size, self.resample))

    def rows(self, tiles: tuple[UInt8, ...]) -> Float32:
        return patch_pixels(tiles, self.patch_size, self.merge_size, self.normalization)

    @property
    def max_patches(self) -> int:
        whole = self.most_tokens * self.merge_size**2
        return whole if self.tiles is None else whole + self.tiles.bounds[1] * (self.tiles.side // self.patch_size) ** 2

    def limited(self, max_tokens: int) -> ImageProcessor:
        most = max(1, min(self.most_tokens, max_tokens))
        changes = {"max_image_tokens": most, "min_image_tokens": min(self.least_tokens, most)}
        if self.tiles is not None:
            per_tile = (self.tiles.side // self.patch_size // self.merge_size) ** 2
            num_tiles = min(self.tiles.bounds[1], (max_tokens - most) // per_tile)
            if num_tiles < self.tiles.bounds[0]:
                return read(self.settings.changed(**changes, do_image_splitting=False))
            changes["max_tiles"] = num_tiles
        return read(self.settings.changed(**changes))

    def _is_large(self, width: int, height: int) -> bool:
        """Return True if a tile of the picture's own size would have too many pixels."""
        assert self.tiles is not None
        side = self.patch_size * self.merge_size
        filled = max(self.patch_size, round(height / side) * side) * max(self.patch_size, round(width / side) * side)
        return filled > self.most_tokens * side**2 * self.tiles.tolerance

    def _whole_tile(self, width: int, height: int) -> ImageTile:
        """Return the picture as one tile, within the token bounds."""
        side = self.patch_size * self.merge_size
        least, most = self.least_tokens * side**2, self.most_tokens * side**2
        rows, cols = max(1, round(height / side)), max(1, round(width / side))
        if rows * cols * side**2 > most:
            shrink = math.sqrt((height * width) / most)
            rows = max(1, math.floor(height / shrink / side))
            cols = max(1, math.floor(width / shrink / side))
        elif rows * cols * side**2 < least:
            grow = math.sqrt(least / (height * width))
            rows, cols = math.ceil(height * grow / side), math.ceil(width * grow / side)
        return ImageTile(rows * self.merge_size, cols * self.merge_size, rows * cols)


def read(settings: ImageSettings) -> ImageProcessor:
    bounds = settings.side("min_tiles", 2), settings.side("max_tiles", 10)
    is_cut = settings.flag("do_image_splitting", True) and bounds != (1, 1)
    if is_cut and bounds[0] > bounds[1]:
        settings.refuse("min_tiles", f"it must be at most max_tiles, {bounds[1]}")
    tiles = TileRule(
        settings.side("tile_size", 512),
        bounds,
        settings.number("max_pixels_tolerance", 2.0),
        settings.flag("use_thumbnail", True),
    )
    return Lfm2Images(
        settings=settings,
        patch_size=settings.side("encoder_patch_size", settings.vision("patch_size", 16)),
        merge_size=settings.side("downsample_factor", 2),
        least_tokens=settings.side("min_image_tokens", 64),
        most_tokens=settings.side("max_image_tokens", 256),
        tiles=tiles if is_cut else None,
        resample=settings.resample(BILINEAR),
        normalization=Normalization.of(*settings.statistics(HALF, HALF)),
    )
