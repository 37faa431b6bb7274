"""Grids of square tiles whose shape is closest to a picture's, and the tiles that they cut it into."""

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
    """(columns, rows) of all grids with `least` to `most` tiles and at most `longest` on a side, by their tiles."""
    sides = range(1, min(most, longest) + 1)
    found = [(cols, rows) for cols in sides for rows in sides if least <= cols * rows <= most]
    return tuple(sorted(found, key=lambda grid: grid[0] * grid[1]))


def closest_grid(
    width: int, height: int, side: int, bounds: tuple[int, int], longest: int = 1 << 10
) -> tuple[int, int]:
    """(columns, rows) of the grid whose ratio of sides is closest to the picture's.

    Among equally close grids it is the largest that the picture fills by more than half. side: of a tile, in pixels.
    bounds: the fewest and the most tiles; longest: the most on a side.
    """
    ratio, best_difference, best = width / height, float("inf"), (1, 1)
    for cols, rows in _grids(*bounds, longest):
        difference = abs(ratio - cols / rows)
        covers_half = width * height > 0.5 * side * side * cols * rows
        if difference < best_difference or (difference == best_difference and covers_half):
            best_difference, best = difference, (cols, rows)
    return best


def cut(pixels: UInt8, side: int) -> Iterator[UInt8]:
    """Square tiles, row by row. The sides of the picture are multiples of `side`."""
    for top in range(0, pixels.shape[0], side):
        for left in range(0, pixels.shape[1], side):
            yield pixels[top : top + side, left : left + side]


def tiles_of_grid(pixels: UInt8, side: int, grid: tuple[int, int], resample: int) -> tuple[UInt8, ...]:
    """The tiles of a picture resized to a grid (columns, rows), and behind several the whole picture as one."""
    cols, rows = grid
    tiles = tuple(cut(resized(pixels, cols * side, rows * side, resample), side))
    return tiles if len(tiles) == 1 else (*tiles, resized(pixels, side, side, resample))


def marked_grid(
    width: int, height: int, grid: tuple[int, int], tile: ImageTile, around: tuple[str, str]
) -> ImageLayout:
    """The layout of a picture cut into a grid (columns, rows) of such tiles, with the marks of Idefics3.

    Several tiles have the whole picture as one more behind them. around: the texts before and after a single one.
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
