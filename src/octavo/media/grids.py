"""Grids of square tiles closest to a picture's aspect ratio, and the tiles that they split it into."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from octavo.image_layout import ImageLayout, ImageTile
from octavo.media.pixels import resized

if TYPE_CHECKING:
    from octavo.media.processor import UInt8

AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"


@cache
def _grids(least: int, most: int, longest: int) -> tuple[tuple[int, int], ...]:
    """Return (columns, rows) of all grids with `least` to `most` tiles and at most `longest` per side, by number of
    tiles.
    """
    sides = range(1, min(most, longest) + 1)
    found = [(cols, rows) for cols in sides for rows in sides if least <= cols * rows <= most]
    return tuple(sorted(found, key=lambda grid: grid[0] * grid[1]))


def closest_grid(
    width: int, height: int, side: int, bounds: tuple[int, int], longest: int = 1 << 10
) -> tuple[int, int]:
    """Return (columns, rows) of the grid whose aspect ratio is closest to the picture's.

    Among equally close grids, this is the largest one that the picture fills by more than half.

    side: side of a tile in pixels
    bounds: minimum and maximum number of tiles
    longest: maximum number of tiles per side
    """
    ratio, best_difference, best = width / height, float("inf"), (1, 1)
    for cols, rows in _grids(*bounds, longest):
        difference = abs(ratio - cols / rows)
        covers_half = width * height > 0.5 * side * side * cols * rows
        if difference < best_difference or (difference == best_difference and covers_half):
            best_difference, best = difference, (cols, rows)
    return best


def cut(pixels: UInt8, side: int) -> Iterator[UInt8]:
    """Yield square tiles, row by row. The sides of the picture must be multiples of `side`."""
    for top in range(0, pixels.shape[0], side):
        for left in range(0, pixels.shape[1], side):
            yield pixels[top : top + side, left : left + side]


def tiles_of_grid(pixels: UInt8, side: int, grid: tuple[int, int], resample: int) -> tuple[UInt8, ...]:
    """Return the tiles of a picture resized to a grid (columns, rows). If there are several, a tile of the whole
    picture follows.
    """
    cols, rows = grid
    tiles = tuple(cut(resized(pixels, cols * side, rows * side, resample), side))
    return tiles if len(tiles) == 1 else (*tiles, resized(pixels, side, side, resample))


def marked_grid(
    width: int, height: int, grid: tuple[int, int], tile: ImageTile, around: tuple[str, str]
) -> ImageLayout:
    """Return the layout of a picture split into a grid (columns, rows) of these tiles, with Idefics3's marks.

    If there are several tiles, a tile of the whole picture follows.

    around: the texts before and after a single tile
    """
    cols, rows = grid
    if cols * rows == 1:
        return ImageLayout(width, height, (tile,), (around[0], tile.num_tokens, around[1]))
    marks: list[str | int] = []
    for row in range(1, rows + 1):
        for col in range(1, cols + 1):
            before = "\n" if row > 1 and col == 1 else ""
            marks += [f"{before}{AROUND}<row_{row}_col_{col}>", tile.num_tokens]
    marks += [f"\n\n{AROUND}{WHOLE}", tile.num_tokens, AROUND]
    return ImageLayout(width, height, (tile,) * (cols * rows + 1), tuple(marks))
