"""Idefics3 and SmolVLM images: square tiles row by row, followed by a tile of the whole picture."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from octavo.media.grids import AROUND, WHOLE, cut, marked_grid
from octavo.media.pixels import Normalization, resized
from octavo.media.processor import ImageLayout, ImageProcessor, Picture
from octavo.media.settings import HALF, LANCZOS, ImageSettings

if TYPE_CHECKING:
    from octavo.media.processor import UInt8

MODEL_TYPES = ("idefics3", "smolvlm")

_LONGEST_SIDE = 4096


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class IdeficsImages(ImageProcessor):
    """Idefics3's image processor.

    side: side of a tile in pixels
    longest_side: longest side of a picture before it is split
    is_split: whether pictures are split; otherwise one tile is used
    """

    placeholder: ClassVar[str] = "<image>"

    side: int
    longest_side: int
    is_split: bool

    def layout(self, width: int, height: int) -> ImageLayout:
        grid, tile = self._grid(width, height), self.square_tile(self.side)
        return marked_grid(width, height, grid, tile, (f"{AROUND}{WHOLE}", AROUND))

    def resize(self, picture: Picture, layout: ImageLayout) -> tuple[UInt8, ...]:
        cols, rows = self._grid(layout.width, layout.height)
        scaled = resized(picture.pixels, *self._scaled(layout.width, layout.height), self.resample)
        whole = resized(scaled, cols * self.side, rows * self.side, self.resample)
        if cols * rows == 1:
            return (whole,)
        return (*cut(whole, self.side), resized(whole, self.side, self.side, self.resample))

    def limited(self, max_tokens: int) -> ImageProcessor:
        num_tokens = self.square_tile(self.side).num_tokens
        tiles_per_side = math.isqrt(max(0, max_tokens // num_tokens - 1))
        longest = min(self.longest_side, tiles_per_side * self.side)
        if longest <= self.side:
            return read(self.settings.changed(do_image_splitting=False))
        return read(self.settings.changed(size={"longest_edge": longest}))

    def frame_text(self, seconds: float) -> str:
        return f"\nFrame from {int(seconds // 60):02d}:{int(seconds % 60):02d}:"

    def _scaled(self, width: int, height: int) -> tuple[int, int]:
        """Return the picture's size with its longest side as configured and the other side even."""
        ratio = width / height
        if width >= height:
            width, height = self.longest_side, int(self.longest_side / ratio)
            height += height % 2
        else:
            height, width = self.longest_side, int(self.longest_side * ratio)
            width += width % 2
        width, height = max(width, 1), max(height, 1)
        ratio = width / height
        if width >= height and width > _LONGEST_SIDE:
            width, height = _LONGEST_SIDE, int(_LONGEST_SIDE / ratio)
        elif height > width and height > _LONGEST_SIDE:
            height, width = _LONGEST_SIDE, int(_LONGEST_SIDE * ratio)
        return max(width, 1), max(height, 1)

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return (columns, rows) of tiles."""
        if not self.is_split:
            return 1, 1
        width, height = self._scaled(width, height)
        ratio = width / height
        if width >= height:
            cols = math.ceil(width / self.side)
            return cols, math.ceil(int(cols * self.side / ratio) / self.side)
        rows = math.ceil(height / self.side)
        return math.ceil(int(rows * self.side * ratio) / self.side), rows


def read(settings: ImageSettings) -> ImageProcessor:
    side = settings.size("max_image_size", {"longest_edge": settings.vision("image_size", 364)})["longest_edge"]
    return IdeficsImages(
        settings=settings,
        side=side,
        longest_side=settings.size("size", {"longest_edge": 4 * side})["longest_edge"],
        is_split=settings.flag("do_image_splitting", True),
        patch_size=settings.vision("patch_size", 14),
        merge_size=settings.text_count("scale_factor", 2),
        resample=settings.resample(LANCZOS),
        normalization=Normalization.of(*settings.statistics(HALF, HALF)),
    )
