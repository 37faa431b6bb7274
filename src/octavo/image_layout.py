"""The layout of an image by its size: the tiles that an encoder sees, and what stands in a prompt for them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ImageTile:
    """A rectangle of pixels that the encoder sees at once.

    grid_rows, grid_cols: its size in patches; num_tokens: the positions of the prompt that it takes. num_frames: of a
    video, whose pixels lie below each other. time: its distance in positions from the first tile of its video, behind
    which it lies in time alone; None: it is the first, or of no video.
    """

    grid_rows: int
    grid_cols: int
    num_tokens: int
    num_frames: int = 1
    time: int | None = None

    @property
    def num_patches(self) -> int:
        """Its patches, each of all frames."""
        return self.grid_rows * self.grid_cols


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """The tiles of an image of a size, and what stands in the prompt for them.

    width, height: of the picture, in pixels. marks: in order; a text is special tokens or plain text such as a line
    feed, a number is as many positions of the tiles, which follow each other (a tile may be split, row by row).
    """

    width: int
    height: int
    tiles: tuple[ImageTile, ...]
    marks: tuple[str | int, ...]

    @property
    def num_tokens(self) -> int:
        """The positions of all tiles, without those of the texts among them."""
        return sum(tile.num_tokens for tile in self.tiles)

    @property
    def num_patches(self) -> int:
        """The patches of all tiles."""
        return sum(tile.num_patches for tile in self.tiles)

    def num_bytes(self, patch_size: int) -> int:
        """The bytes of the pixels of all tiles and frames. patch_size: pixels at the side of a patch."""
        return 3 * patch_size**2 * sum(tile.num_frames * tile.num_patches for tile in self.tiles)
