"""Pixels that image processors share: resampling by Pillow, normalization, and patches in the order of blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from octavo.media.settings import Triple

if TYPE_CHECKING:
    from octavo.batch import Float32
    from octavo.media.processor import UInt8


def resized(pixels: UInt8, width: int, height: int, resample: int) -> UInt8:
    """uint8 [height, width, 3] of other pixels.

    resample: the number of Pillow's filter.
    """
    from PIL import Image  # an extra of the installation

    if pixels.shape[:2] == (height, width):
        return pixels
    image = Image.fromarray(pixels).resize((width, height), Image.Resampling(resample))
    return np.asarray(image, np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class Normalization:
    """table: each of the 256 values of a colour as the model takes it, float32 [3, 256]. The rest is its origin."""

    table: Float32 = field(compare=False)
    factor: float
    mean: Triple
    std: Triple

    @staticmethod
    def of(factor: float, mean: Triple | None, std: Triple | None) -> Normalization:
        """(value x factor - mean) / std: the product in float64, the rest in float32, as in transformers."""
        scaled = (np.arange(256, dtype=np.float64) * factor).astype(np.float32)
        if mean is None or std is None:
            mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        pairs = zip(np.array(mean, np.float32), np.array(std, np.float32), strict=True)
        return Normalization(np.stack([(scaled - middle) / width for middle, width in pairs]), factor, mean, std)


def blocks(pixels: UInt8, patch_size: int, merge_size: int) -> UInt8:
    """uint8 [patches, 3, patch_size, patch_size] of pixels [height, width, 3]: block by block, row by row in a block.

    height and width are multiples of a block's side.
    """
    side = patch_size * merge_size
    num_rows, num_cols = pixels.shape[0] // side, pixels.shape[1] // side
    split = pixels.reshape(num_rows, merge_size, patch_size, num_cols, merge_size, patch_size, 3)
    ordered = split.transpose(0, 3, 1, 4, 6, 2, 5)
    patches: UInt8 = ordered.reshape(-1, 3, patch_size, patch_size)
    return patches


def normalized(patches: UInt8, normalization: Normalization) -> Float32:
    """float32 [patches, 3, ...] of such patches."""
    values = np.empty(patches.shape, np.float32)
    for colour in range(3):
        np.take(normalization.table[colour], patches[:, colour], out=values[:, colour])
    return values


def planes(tiles: tuple[UInt8, ...], patch_size: int, merge_size: int, normalization: Normalization) -> Float32:
    """float32 [patches of all tiles, 3 x patch_size x patch_size]: colour, y, x."""
    parts = [normalized(blocks(tile, patch_size, merge_size), normalization) for tile in tiles]
    return np.concatenate([part.reshape(len(part), -1) for part in parts])


def patch_pixels(tiles: tuple[UInt8, ...], patch_size: int, merge_size: int, normalization: Normalization) -> Float32:
    """float32 [patches of all tiles, patch_size x patch_size x 3]: y, x, colour."""
    parts = [normalized(blocks(tile, patch_size, merge_size), normalization) for tile in tiles]
    return np.concatenate([part.transpose(0, 2, 3, 1).reshape(len(part), -1) for part in parts])
