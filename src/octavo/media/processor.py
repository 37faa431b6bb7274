"""Image processors: each turns pictures into the tiles and rows of patches that its model family expects."""

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


# Widths and heights of pictures that are split into the maximum number of tiles.
_PROBES = [(width, height) for width in (64, 1024, 4096, 8192) for height in (64, 1024, 4096, 8192)]

# Limits for videos in families without their own rule: tokens per frame, frames, and bytes of all tiles.
_FRAME_TOKENS, _MOST_FRAMES, _MOST_FRAME_BYTES = 256, 32, 44 << 20

__all__ = ["ImageLayout", "ImageProcessor", "ImageTile", "Picture", "UInt8", "image_families", "read_processor"]


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A decoded picture.

    pixels: uint8 [height, width, 3], RGB, rotated according to its EXIF data, with transparency on white
    """

    pixels: UInt8

    @property
    def width(self) -> int:
        return int(self.pixels.shape[1])

    @property
    def height(self) -> int:
        return int(self.pixels.shape[0])


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ImageProcessor(ABC):
    """The conversion of a picture to rows of patches for one model family.

    placeholder: text that a chat template writes for an image; the layout's marks replace it
    wrapping: the texts before and after the placeholder where no template writes them
    video_placeholder: the mark of a video in raw prompts, if it differs
    gives_vectors: an image is a prompt of its own, whose only row is its vector; there is no placeholder
    version: changes whenever the same picture may give different rows
    settings: the settings that the processor was made from
    patch_size: side of a patch in pixels
    merge_size: side, in patches, of the block that becomes one token
    resample: Pillow's number for the filter
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
        """Return the layout of a picture of this size. Raises UsageError for a size that the family does not
        support.
        """

    def resize(self, picture: Picture, layout: ImageLayout) -> tuple[UInt8, ...]:
        """Return uint8 [height, width, 3] for each tile, resampled with Pillow. By default, the only tile is the whole
        picture.
        """
        (tile,), side = layout.tiles, self.patch_size
        return (resized(picture.pixels, tile.grid_cols * side, tile.grid_rows * side, self.resample),)

    def rows(self, tiles: tuple[UInt8, ...]) -> Float32:
        """Return the normalized patches of all tiles as rows, [patches of all tiles, values of a patch].

        By default, a patch's values are ordered colour by colour. The patches of a block that becomes one token are
        consecutive, row by row, and so are the blocks of a tile.
        """
        return planes(tiles, self.patch_size, self.merge_size, self.normalization)

    def reel(self, video: VideoHeader) -> Reel:
        """Return the frames of a video that the model sees: by default small images, one per second, each after a text
        with its time.

        Raises UsageError for a size that the family does not support.
        """
        layout = self.limited(_FRAME_TOKENS).layout(video.width, video.height)
        size = layout.num_bytes(self.patch_size)
        most = min(_MOST_FRAMES, max(1, _MOST_FRAME_BYTES // size), video.num_frames)
        numbers = spread(video.num_frames, min(max(1, round(video.num_frames / video.frames_per_second)), most))
        texts = [self.frame_text(number / video.frames_per_second) for number in numbers]
        return Reel((layout,) * len(numbers), between(self, texts), tuple((number,) for number in numbers))

    def frame_text(self, seconds: float) -> str:
        """Return the text before a video frame at this time."""
        return f"<{seconds:.1f} seconds>"

    def frame_tiles(self, frames: Sequence[Picture], layout: ImageLayout) -> tuple[UInt8, ...]:
        """Return the tiles of an item of `reel`. If a patch spans several frames, they are stacked vertically."""
        return self.limited(_FRAME_TOKENS).resize(frames[0], layout)

    def frame_rows(self, tiles: tuple[UInt8, ...], num_frames: int) -> Float32:
        """Return the `rows` of tiles that stack `num_frames` frames vertically, by default one."""
        del num_frames
        return self.rows(tiles)

    @abstractmethod
    def limited(self, max_tokens: int) -> ImageProcessor:
        """Return the processor with at most `max_tokens` tokens per image, or with the minimum that the family supports
        if that is more.
        """

    @property
    def max_patches(self) -> int:
        """Number of patches in the largest image."""
        return max(self.layout(width, height).num_patches for width, height in _PROBES)

    def square_tile(self, side: int) -> ImageTile:
        """Return a tile of side x side pixels."""
        patches = side // self.patch_size
        return ImageTile(patches, patches, (patches // self.merge_size) ** 2)


@cache
def image_families() -> Mapping[str, str]:
    """Return every `model_type` whose images can be read, with the module of its family."""
    found = {}
    for module in pkgutil.iter_modules(families.__path__):
        for model_type in _family(module.name).MODEL_TYPES:
            found[model_type] = module.name
    return found


def read_processor(
    model_type: str, config: Mapping[str, Any], preprocessor: Mapping[str, Any] | None = None
) -> ImageProcessor:
    """Return the image processor of a model.

    config: content of config.json
    preprocessor: content of preprocessor_config.json or of its replacement in processor_config.json; without it, the
    values are those that the family was published with

    Raises ModelLoadError naming the key.
    """
    if model_type not in image_families():
        known = ", ".join(sorted(image_families()))
        raise ModelLoadError(f"images of {model_type!r:.80} cannot be read; supported: {known}")
    settings = ImageSettings(model_type, dict(config), dict(preprocessor or {}))
    processor: ImageProcessor = _family(image_families()[model_type]).read(settings)
    return processor


def _family(name: str) -> Any:
    return importlib.import_module(f"{families.__name__}.{name}")
