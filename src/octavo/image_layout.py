"""Layout of an image of a given size: the tiles that an encoder sees, and what represents them in a prompt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ImageTile:
    """A rectangle of pixels that the encoder processes at once.

    grid_rows, grid_cols: its size in patches.
    num_tokens: positions it occupies in the prompt.
    num_frames: number of video frames in the tile; their pixels are stacked vertically.
    time: distance in positions from the first tile of its video, if tiles are separated only by time; None for the
        first tile and for images.
    """

    grid_rows: int
    grid_cols: int
    num_tokens: int
    num_frames: int = 1
    time: int | None = None

    @property
    def num_patches(self) -> int:
        """Number of patches, each spanning all frames."""
        return self.grid_rows * self.grid_cols


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """Tiles of an image of a given size, and what represents them in the prompt.

    width, height: size of the picture in pixels.
    marks: in order, texts (special tokens or plain text such as a line feed) and numbers of positions that belong to
        the tiles, one after another; a tile may be split row by row.
    """

    width: int
    height: int
    tiles: tuple[ImageTile, ...]
    marks: tuple[str | int, ...]

    @property
    def num_tokens(self) -> int:
        """Number of positions that all tiles occupy, not counting the texts between them."""
        return sum(tile.num_tokens for tile in self.tiles)

    @property
    def num_patches(self) -> int:
        """Number of patches in all tiles."""
        return sum(tile.num_patches for tile in self.tiles)

    def num_bytes(self, patch_size: int) -> int:
        """Return the size in bytes of the pixels of all tiles and frames.

        patch_size: side of a patch in pixels.
        """
        return 3 * patch_size**2 * sum(tile.num_frames * tile.num_patches for tile in self.tiles)
