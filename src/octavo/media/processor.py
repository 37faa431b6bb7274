"""An image on its way into a model: a picture, its tiles and its rows of patches, as each family makes them."""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from octavo.errors import ModelLoadError
from octavo.image_layout import ImageLayout, ImageTile
from octavo.media import families
from octavo.media.pixels import Normalization, planes, resized
from octavo.media.reels import Reel, VideoHeader, between, spread
from octavo.media.settings import ImageSettings

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from octavo.batch import Float32

    UInt8: TypeAlias = npt.NDArray[np.uint8]


# Widths and heights of pictures that are cut into as many tiles as can be.
_PROBES = [(width, height) for width in (64, 1024, 4096, 8192) for height in (64, 1024, 4096, 8192)]

# Of a video in families without a rule of their own: tokens of a frame, frames, and bytes of their tiles in all.
_FRAME_TOKENS, _MOST_FRAMES, _MOST_FRAME_BYTES = 256, 32, 44 << 20

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


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ImageProcessor(ABC):
    """The way of a family of models from a picture to rows of patches.

    placeholder: what a chat template writes for an image; the marks of the layout take its place.
    wrapping: the texts before and after the placeholder where no template writes them.
    video_placeholder: the mark of a video in raw prompts, where it is another one.
    gives_vectors: an image is a prompt of its own, whose only row is its vector; there is no placeholder.
    version: changes whenever the same picture may give other rows.
    settings: what it was read from. patch_size: pixels at the side of a patch. merge_size: patches at the side of the
    block that becomes one token. resample: the number of Pillow's filter.
    """

    placeholder: ClassVar[str]
    wrapping: ClassVar[tuple[str, str]] = ("", "")
    video_placeholder: ClassVar[str | None] = None
    gives_vectors: ClassVar[bool] = False
    version: ClassVar[int] = 1

    settings: ImageSettings = field(compare=False)
    patch_size: int
    merge_size: int
    resample: int
    normalization: Normalization

    @abstractmethod
    def layout(self, width: int, height: int) -> ImageLayout:
        """The layout of a picture of this size. Raises UsageError for a size that the family cannot take."""

    def resize(self, picture: Picture, layout: ImageLayout) -> tuple[UInt8, ...]:
        """uint8 [height, width, 3] for each tile, by Pillow's resampling; here the whole picture as the only tile."""
        (tile,), side = layout.tiles, self.patch_size
        return (resized(picture.pixels, tile.grid_cols * side, tile.grid_rows * side, self.resample),)

    def rows(self, tiles: tuple[UInt8, ...]) -> Float32:
        """[patches of all tiles, values of a patch], normalized; here colour by colour.

        The patches of a block that becomes one token follow each other, row by row, and so do the blocks of a tile.
        """
        return planes(tiles, self.patch_size, self.merge_size, self.normalization)

    def reel(self, video: VideoHeader) -> Reel:
        """The frames of a video that are seen. Here as small images, one a second, each after a text with its time.

        Raises UsageError for a size that the family cannot take.
        """
        layout = self.limited(_FRAME_TOKENS).layout(video.width, video.height)
        size = layout.num_bytes(self.patch_size)
        most = min(_MOST_FRAMES, max(1, _MOST_FRAME_BYTES // size), video.num_frames)
        numbers = spread(video.num_frames, min(max(1, round(video.num_frames / video.frames_per_second)), most))
        texts = [self.frame_text(number / video.frames_per_second) for number in numbers]
        return Reel((layout,) * len(numbers), between(self, texts), tuple((number,) for number in numbers))

    def frame_text(self, seconds: float) -> str:
        """The text before a frame of a video at this time."""
        return f"<{seconds:.1f} seconds>"

    def frame_tiles(self, frames: Sequence[Picture], layout: ImageLayout) -> tuple[UInt8, ...]:
        """The tiles of an item of `reel` from its frames, which lie below each other where a patch has several."""
        return self.limited(_FRAME_TOKENS).resize(frames[0], layout)

    def frame_rows(self, tiles: tuple[UInt8, ...], num_frames: int) -> Float32:
        """The `rows` of tiles with so many frames below each other; here one."""
        del num_frames
        return self.rows(tiles)

    @abstractmethod
    def limited(self, max_tokens: int) -> ImageProcessor:
        """The processor with at most `max_tokens` tokens an image, or with the fewest that the family can take if
        those are more."""

    @property
    def max_patches(self) -> int:
        """The patches of the largest image."""
        return max(self.layout(width, height).num_patches for width, height in _PROBES)

    def square_tile(self, side: int) -> ImageTile:
        """A tile of side x side pixels."""
        patches = side // self.patch_size
        return ImageTile(patches, patches, (patches // self.merge_size) ** 2)


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
