"""Gemma 4 images: one tile as large as the token limit allows, in the picture's aspect ratio."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from octavo.errors import ModelLoadError, UsageError
from octavo.media.pixels import Normalization, patch_pixels
from octavo.media.processor import ImageLayout, ImageProcessor, ImageTile
from octavo.media.settings import BICUBIC, HALF, ImageSettings

if TYPE_CHECKING:
    from octavo.batch import Float32
    from octavo.media.processor import UInt8

MODEL_TYPES = ("gemma4", "gemma4_unified")

_BUDGETS = (70, 140, 280, 560, 1120)  # token limits that the models were trained with


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Gemma4Images(ImageProcessor):
    """Gemma 4's image processor.

    token_side: side in pixels of the square that becomes one token
    max_tokens: maximum number of tokens per image
    """

    placeholder: ClassVar[str] = "<|image|>"

    max_tokens: int

    @property
    def token_side(self) -> int:
        return self.patch_size * self.merge_size

    def layout(self, width: int, height: int) -> ImageLayout:
        cols, rows = self._fitted(width, height)
        tile = ImageTile(rows * self.merge_size, cols * self.merge_size, rows * cols)
        return ImageLayout(width, height, (tile,), ("<|image>", tile.num_tokens, "<image|>"))

    def rows(self, tiles: tuple[UInt8, ...]) -> Float32:
        return patch_pixels(tiles, self.patch_size, self.merge_size, self.normalization)

    @property
    def max_patches(self) -> int:
        return self.max_tokens * self.merge_size**2

    def limited(self, max_tokens: int) -> ImageProcessor:
        budget = max([least for least in _BUDGETS if least <= max_tokens], default=_BUDGETS[0])
        return read(self.settings.changed(max_soft_tokens=min(budget, self.max_tokens)))

    def _fitted(self, width: int, height: int) -> tuple[int, int]:
        """Return the largest allowed (columns, rows) of tokens in about the picture's aspect ratio."""
        side = self.token_side
        pixels = self.max_tokens * side**2
        factor = math.sqrt(pixels / (height * width))
        rows, cols = math.floor(factor * height / side), math.floor(factor * width / side)
        if rows == 0:
            rows, cols = 1, min(math.floor(width / height), self.max_tokens)
        elif cols == 0:
            rows, cols = min(math.floor(height / width), self.max_tokens), 1
        if not rows * cols:
            raise UsageError(f"is {width} x {height} pixels and cannot be fitted into {self.max_tokens} tokens")
        return cols, rows


def read(settings: ImageSettings) -> ImageProcessor:
    is_whole = settings.model_type == "gemma4_unified"  # it has no encoder: a token's square is its patch
    patch_size, merge_size = settings.side("patch_size", 16), settings.side("pooling_kernel_size", 3)
    max_tokens = settings.side("max_soft_tokens", 280)
    if max_tokens not in _BUDGETS:
        raise ModelLoadError(f"preprocessor_config.json: max_soft_tokens is {max_tokens}; it must be one of {_BUDGETS}")
    factor, mean, std = settings.statistics(HALF, HALF)
    is_normalized = settings.flag("do_normalize", False)
    return Gemma4Images(
        settings=settings,
        patch_size=patch_size * merge_size if is_whole else patch_size,
        merge_size=1 if is_whole else merge_size,
        max_tokens=max_tokens,
        resample=settings.resample(BICUBIC),
        normalization=Normalization.of(factor, mean if is_normalized else None, std if is_normalized else None),
    )
