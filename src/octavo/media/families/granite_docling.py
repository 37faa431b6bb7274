"""granite-docling pages: the grid of tiles closest to the page's aspect ratio, with Idefics3's marks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from octavo.media.grids import AROUND, closest_grid, marked_grid, tiles_of_grid
from octavo.media.pixels import Normalization
from octavo.media.processor import ImageLayout, ImageProcessor, Picture
from octavo.media.settings import BICUBIC, CLIP_MEAN, CLIP_STD, ImageSettings

if TYPE_CHECKING:
    from octavo.media.processor import UInt8

MODEL_TYPES = ("granite_docling",)

_LONGEST_GRID = 16  # the marks for rows and columns end there


@dataclass(frozen=True, slots=True)
class DenseRule:
    """The rule that gives more tiles to wide pages that would otherwise shrink too much.

    most: maximum number of tiles of such pages; 0 turns the rule off
    scale: scale of the page's width below which a page shrinks too much, or 0 for no limit
    least_ratio, most_ratio: bounds on the ratio of width to height, or 0 for no bound
    """

    most: int
    scale: float
    least_ratio: float
    most_ratio: float

    def holds(self, width: int, height: int, grid_width: int) -> bool:
        """Return True if the rule applies to a page.

        grid_width: width in pixels of the page if it were resized like other pages
        """
        ratio = width / height
        return bool(
            self.most
            and (self.scale > 0 or self.least_ratio > 0)
            and not (self.least_ratio > 0 and ratio <= self.least_ratio)
            and not (self.most_ratio > 0 and ratio > self.most_ratio)
            and not (self.scale > 0 and grid_width / width >= self.scale)
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DoclingPages(ImageProcessor):
    """granite-docling's image processor.

    side: side of a tile in pixels
    bounds: minimum and maximum number of tiles per page
    """

    placeholder: ClassVar[str] = "<image>"

    side: int
    bounds: tuple[int, int]
    dense: DenseRule

    def layout(self, width: int, height: int) -> ImageLayout:
        grid, tile = self._grid(width, height), self.square_tile(self.side)
        return marked_grid(width, height, grid, tile, (f"{AROUND}<row_1_col_1>", "\n"))

    def resize(self, picture: Picture, layout: ImageLayout) -> tuple[UInt8, ...]:
        return tiles_of_grid(picture.pixels, self.side, self._grid(layout.width, layout.height), self.resample)

    @property
    def max_patches(self) -> int:
        most = max(self.bounds[1], self.dense.most)
        return (most + (most > 1)) * (self.side // self.patch_size) ** 2

    def limited(self, max_tokens: int) -> ImageProcessor:
        num_tokens = self.square_tile(self.side).num_tokens
        most = max(1, min(self.bounds[1], max_tokens // num_tokens - 1))
        return read(self.settings.changed(max_patches=most, min_patches=min(self.bounds[0], most), dense_max_patches=0))

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return (columns, rows) of tiles."""
        grid = closest_grid(width, height, self.side, self.bounds, _LONGEST_GRID)
        if not self.dense.holds(width, height, grid[0] * self.side):
            return grid
        return closest_grid(width, height, self.side, (self.bounds[0], self.dense.most), _LONGEST_GRID)


def read(settings: ImageSettings) -> ImageProcessor:
    if settings.flag("fine_route", False):
        settings.refuse("fine_route", "the finer tokens of a page are not supported")
    side = settings.size("size", {"height": 512, "width": 512})["height"]
    most = settings.side("max_patches", 32) if settings.flag("crop_to_patches", True) else 1
    dense = settings.preprocessor.get("dense_max_patches")
    return DoclingPages(
        settings=settings,
        side=side,
        patch_size=settings.vision("patch_size", 16),
        merge_size=settings.vision("scale_factor", 4),
        bounds=(min(settings.side("min_patches", 1), most), most),
        dense=DenseRule(
            settings.side("dense_max_patches", 1) if dense and most > 1 else 0,
            settings.number("dense_max_scale", 0),
            settings.number("dense_min_aspect", 0),
            settings.number("dense_max_aspect", 0),
        ),
        resample=settings.resample(BICUBIC),
        normalization=Normalization.of(*settings.statistics(CLIP_MEAN, CLIP_STD)),
    )
