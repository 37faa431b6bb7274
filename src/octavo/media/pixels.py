"""Pixel operations that image processors share: resampling with Pillow, normalization, and patches in block order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from octavo.media.settings import Triple

if TYPE_CHECKING:
    from octavo.batch import Float32
    from octavo.media.processor import UInt8


def resized(pixels: UInt8, width: int, height: int, resample: int) -> UInt8:
    """Resize pixels to uint8 [height, width, 3].

    resample: Pillow's number for the filter
    """
    from PIL import Image  # an extra of the installation

    if pixels.shape[:2] == (height, width):
        return pixels
    image = Image.fromarray(pixels).resize((width, height), Image.Resampling(resample))
    return np.asarray(image, np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class Normalization:
    """The normalization of pixel values. The other fields are the parameters that the table was made from.

    table: the model's input for each of a colour's 256 values, float32 [3, 256]
    """

    table: Float32 = field(compare=False)
    factor: float
    mean: Triple
    std: Triple

    @staticmethod
    def of(factor: float, mean: Triple | None, std: Triple | None) -> Normalization:
        """Return the normalization (value x factor - mean) / std, with the product in float64 and the rest in float32,
        as in transformers.
        """
        scaled = (np.arange(256, dtype=np.float64) * factor).astype(np.float32)
        if mean is None or std is None:
            mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        pairs = zip(np.array(mean, np.float32), np.array(std, np.float32), strict=True)
        return Normalization(np.stack([(scaled - middle) / width for middle, width in pairs]), factor, mean, std)


def blocks(pixels: UInt8, patch_size: int, merge_size: int) -> UInt8:
    """Split pixels [height, width, 3] into patches, uint8 [patches, 3, patch_size, patch_size].

    The order is block by block, and row by row within a block. Height and width must be multiples of a block's side.
    """
    side = patch_size * merge_size
    num_rows, num_cols = pixels.shape[0] // side, pixels.shape[1] // side
    split = pixels.reshape(num_rows, merge_size, patch_size, num_cols, merge_size, patch_size, 3)
    ordered = split.transpose(0, 3, 1, 4, 6, 2, 5)
    patches: UInt8 = ordered.reshape(-1, 3, patch_size, patch_size)
    return patches


def normalized(patches: UInt8, normalization: Normalization) -> Float32:
    """Normalize patches, and return float32 [patches, 3, ...]."""
    values = np.empty(patches.shape, np.float32)
    for colour in range(3):
        np.take(normalization.table[colour], patches[:, colour], out=values[:, colour])
    return values


def planes(tiles: tuple[UInt8, ...], patch_size: int, merge_size: int, normalization: Normalization) -> Float32:
    """Return the patches as rows of float32 [patches of all tiles, 3 x patch_size x patch_size], ordered by colour, y,
    x.
    """
    parts = [normalized(blocks(tile, patch_size, merge_size), normalization) for tile in tiles]
    return np.concatenate([part.reshape(len(part), -1) for part in parts])


def patch_pixels(tiles: tuple[UInt8, ...], patch_size: int, merge_size: int, normalization: Normalization) -> Float32:
    """Return the patches as rows of float32 [patches of all tiles, patch_size x patch_size x 3], ordered by y, x,
    colour.
    """
    parts = [normalized(blocks(tile, patch_size, merge_size), normalization) for tile in tiles]
    return np.concatenate([part.transpose(0, 2, 3, 1).reshape(len(part), -1) for part in parts])
