"""An image on its way into a model: a picture, the layout of its tokens by its size, its tiles, and rows of patches."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from octavo.errors import ModelLoadError
from octavo.image_layout import ImageLayout, ImageTile
from octavo.media import families
from octavo.media.settings import ImageSettings

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from octavo.batch import Float32

    UInt8: TypeAlias = npt.NDArray[np.uint8]


__all__ = ["ImageLayout", "ImageProcessor", "ImageTile", "Picture", "UInt8", "image_families", "read_processor"]


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """pixels: uint8 [height, width, 3], RGB, turned as its EXIF data says, transparency on white."""

    pixels: UInt8

    @property
    def width(self) -> int:
        return int(self.pixels.shape[1])

    @property
    def height(self) -> int:
        return int(self.pixels.shape[0])


class ImageProcessor(Protocol):
    """The way of a family of models from a picture to rows of patches.

    patch_size: pixels at the side of a patch. merge_size: patches at the side of the block that becomes one token.
    placeholder: what a chat template writes for an image; the marks of the layout take its place.
    wrapping: the texts before and after the placeholder where no template writes them.
    version: changes whenever the same picture may give other rows.
    settings: what it was read from.
    """

    @property
    def patch_size(self) -> int: ...
    @property
    def merge_size(self) -> int: ...
    @property
    def placeholder(self) -> str: ...
    @property
    def wrapping(self) -> tuple[str, str]: ...
    @property
    def version(self) -> int: ...
    @property
    def settings(self) -> ImageSettings: ...

    def layout(self, width: int, height: int) -> ImageLayout:
        """The layout of a picture of this size. Raises UsageError for a size that the family cannot take."""

    def resize(self, picture: Picture, layout: ImageLayout) -> tuple[UInt8, ...]:
        """uint8 [height, width, 3] for each tile, by Pillow's resampling."""

    def rows(self, tiles: tuple[UInt8, ...], layout: ImageLayout) -> Float32:
        """[patches of all tiles, values of a patch], normalized.

        The patches of a block that becomes one token follow each other, row by row, and so do the blocks of a tile.
        """

    def limited(self, max_tokens: int) -> ImageProcessor:
        """The processor with at most so many tokens an image, or with the fewest that the family can take if those
        are more."""


@cache
def image_families() -> Mapping[str, str]:
    """Every `model_type` whose images can be read, with the module of its family."""
    found = {}
    for module in pkgutil.iter_modules(families.__path__):
        for model_type in _family(module.name).MODEL_TYPES:
            found[model_type] = module.name
    return found


def read_processor(
    model_type: str, config: Mapping[str, Any], preprocessor: Mapping[str, Any] | None = None
) -> ImageProcessor:
    """The processor of a model.

    config: config.json. preprocessor: preprocessor_config.json, or what processor_config.json has in its place; without
    it the values are those with which the family was published. Raises ModelLoadError naming the key.
    """
    if model_type not in image_families():
        known = ", ".join(sorted(image_families()))
        raise ModelLoadError(f"images of {model_type!r:.80} cannot be read; those of {known} can")
    settings = ImageSettings(model_type, dict(config), dict(preprocessor or {}))
    processor: ImageProcessor = _family(image_families()[model_type]).read(settings)
    return processor


def _family(name: str) -> Any:
    return importlib.import_module(f"{families.__name__}.{name}")
