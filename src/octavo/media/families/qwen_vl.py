"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen 3.5 images and videos: one tile of any size, in the picture's aspect
ratio.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from octavo.errors import UsageError
from octavo.media.pixels import Normalization, blocks, normalized, resized
from octavo.media.processor import ImageLayout, ImageProcessor, ImageTile, Picture
from octavo.media.reels import Reel, VideoHeader, between, spread
from octavo.media.settings import BICUBIC, CLIP_MEAN, CLIP_STD, HALF, ImageSettings

if TYPE_CHECKING:
    from octavo.batch import Float32
    from octavo.media.processor import UInt8

MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")

_MAX_RATIO = 200
_NUM_FRAMES = 2  # for a still picture, both are the same
_VIDEO_IMAGES = 8  # a video has at most as many pixels as this number of images of the maximum size
_VIDEO_PIXELS = 15 << 20  # in all frames together, so that they fit into a prompt


@dataclass(frozen=True, slots=True)
class VideoRule:
    """The rule for the number and size of the frames that the model sees of a video.

    rate: frames per second
    least_frames, most_frames: bounds on the number of frames in a video
    least_pixels, most_pixels: bounds on the pixels per frame in Qwen 2 and 2.5, and per video in later models
    tokens_per_second: positions per second in Qwen 2.5. None if consecutive pairs of frames are one position apart, or
        if each pair follows a text with its time
    """

    rate: float
    least_frames: int
    most_frames: int
    least_pixels: int
    most_pixels: int
    tokens_per_second: int | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class QwenImages(ImageProcessor):
    """Qwen's image and video processor.

    num_frames: number of frames per patch
    least_pixels, most_pixels: bounds on the pixels of the resized picture
    has_times: whether texts with times precede the frames of a video; otherwise their positions reflect the times
    """

    placeholder: ClassVar[str] = "<|image_pad|>"
    wrapping: ClassVar[tuple[str, str]] = ("<|vision_start|>", "<|vision_end|>")
    video_placeholder: ClassVar[str | None] = "<|video_pad|>"

    num_frames: int
    least_pixels: int
    most_pixels: int
    has_times: bool
    video: VideoRule

    @property
    def max_patches(self) -> int:
        return self.most_pixels // self.patch_size**2

    def layout(self, width: int, height: int) -> ImageLayout:
        _check_ratio(width, height)
        tile = self._tile(*self._fitted(height, width, self.least_pixels, self.most_pixels))
        return ImageLayout(width, height, (tile,), (tile.num_tokens,))

    def reel(self, video: VideoHeader) -> Reel:
        _check_ratio(video.width, video.height)
        numbers = self._sampled(video)
        size = self._fitted_video(video, len(numbers))
        padded = [*numbers, *numbers[-1:] * (-len(numbers) % self.num_frames)]
        groups = [tuple(padded[i : i + self.num_frames]) for i in range(0, len(padded), self.num_frames)]
        tile = replace(self._tile(*size), num_frames=self.num_frames)
        tiles = [replace(tile, time=time) for time in self._times(video, groups)]
        layouts = [ImageLayout(video.width, video.height, (tile,), (tile.num_tokens,)) for tile in tiles]
        texts: tuple[str, ...] = ("",) * len(groups)
        if self.has_times:
            seconds = [(group[0] + group[-1]) / 2 / video.frames_per_second for group in groups]
            texts = between(self, [f"<{second:.1f} seconds>" for second in seconds])
        return Reel(tuple(layouts), texts, tuple(groups))

    def frame_tiles(self, frames: Sequence[Picture], layout: ImageLayout) -> tuple[UInt8, ...]:
        (tile,), side = layout.tiles, self.patch_size
        width, height = tile.grid_cols * side, tile.grid_rows * side
        return (np.concatenate([resized(frame.pixels, width, height, self.resample) for frame in frames]),)

    def rows(self, tiles: tuple[UInt8, ...]) -> Float32:
        return self.frame_rows(tiles, 1)

    def frame_rows(self, tiles: tuple[UInt8, ...], num_frames: int) -> Float32:
        frames = np.split(tiles[0], num_frames)
        parts = [normalized(blocks(frame, self.patch_size, self.merge_size), self.normalization) for frame in frames]
        patches = np.stack(parts, axis=2)  # [patches, 3, frames, y, x]
        whole = np.broadcast_to(patches, (*patches.shape[:2], self.num_frames, *patches.shape[3:]))
        return whole.reshape(len(whole), -1)

    def limited(self, max_tokens: int) -> ImageProcessor:
        pixels = max_tokens * (self.patch_size * self.merge_size) ** 2
        return read(self.settings.changed(max_pixels=max(self.least_pixels, min(pixels, self.most_pixels))))

    def _tile(self, height: int, width: int) -> ImageTile:
        rows, cols = height // self.patch_size, width // self.patch_size
        return ImageTile(rows, cols, rows * cols // self.merge_size**2)

    def _fitted(
        self, height: int, width: int, least: int, most: int, count: int = 1, planned: int = 1
    ) -> tuple[int, int]:
        """Return (height, width) as multiples of a block's side, with `least` to `most` pixels in all and about the
        same ratio.

        count: number of frames of this size
        planned: `count` rounded to whole groups
        """
        side = self.patch_size * self.merge_size
        new_height, new_width = round(height / side) * side, round(width / side) * side  # rounds halves to even numbers
        if planned * new_height * new_width > most:
            shrink = math.sqrt((count * height * width) / most)
            new_height = max(side, math.floor(height / shrink / side) * side)
            new_width = max(side, math.floor(width / shrink / side) * side)
        elif planned * new_height * new_width < least:
            grow = math.sqrt(least / (count * height * width))
            new_height = math.ceil(height * grow / side) * side
            new_width = math.ceil(width * grow / side) * side
        return new_height, new_width

    def _fitted_video(self, video: VideoHeader, count: int) -> tuple[int, int]:
        """Return the height and width of each of `count` frames.

        This is the size that the rule requires, or a smaller one if a prompt could not contain all frames otherwise.
        """
        rule, height, width = self.video, video.height, video.width
        if self.has_times:
            side = self.patch_size * self.merge_size
            if height < side or width < side:
                scale = max(side / height, side / width)
                height, width = int(height * scale), int(width * scale)
            planned = max(1, round(count / self.num_frames)) * self.num_frames
            size = self._fitted(height, width, rule.least_pixels, rule.most_pixels, count, planned)
        else:
            size = self._fitted(height, width, rule.least_pixels, rule.most_pixels)
        most = min(self.most_pixels, min(_VIDEO_IMAGES * self.most_pixels, _VIDEO_PIXELS) // count)
        if size[0] * size[1] > most:
            size = self._fitted(height, width, 0, most)
        if size[0] * size[1] > most:
            raise UsageError(
                f"is {video.width} x {video.height} pixels: {count} frames that narrow have too many pixels in total; "
                "crop it or send a shorter one",
                code="image_too_narrow",
            )
        return size

    def _sampled(self, video: VideoHeader) -> list[int]:
        """Return the numbers of the frames that the model sees."""
        rule, total = self.video, video.num_frames
        wanted = total / video.frames_per_second * rule.rate
        if self.has_times:
            return list(spread(total, min(max(int(wanted), rule.least_frames), rule.most_frames, total)))
        group = self.num_frames
        most = min(rule.most_frames, total) // group * group
        count = max(1, math.floor(min(max(wanted, rule.least_frames), most) / group) * group)
        return [int(i * (total / count)) for i in range(count)]

    def _times(self, video: VideoHeader, groups: Sequence[tuple[int, ...]]) -> list[int | None]:
        """Return each group's distance from the first in positions; None for a group that is a picture of its own."""
        if self.has_times:
            return [None] * len(groups)
        if self.video.tokens_per_second is None:
            return [None, *range(1, len(groups))]
        shown = len({number for group in groups for number in group}) / video.num_frames * video.frames_per_second
        step = np.float32(self.num_frames / shown) * np.float32(self.video.tokens_per_second)
        return [None, *(int(i * step) for i in np.arange(1, len(groups), dtype=np.float32))]


def _check_ratio(width: int, height: int) -> None:
    if max(width, height) > _MAX_RATIO * min(width, height):
        raise UsageError(
            f"is {width} x {height} pixels: one side is more than {_MAX_RATIO} times the other, too much for this "
            "model; crop it",
            code="image_too_narrow",
        )


def read(settings: ImageSettings) -> ImageProcessor:
    is_second = settings.model_type.startswith("qwen2")
    bounds = settings.size(
        "size",
        {"shortest_edge": 56 * 56 if is_second else 1 << 16, "longest_edge": 28 * 28 * 1280 if is_second else 1 << 24},
        most=1 << 28,
    )
    mean, std = (CLIP_MEAN, CLIP_STD) if is_second else (HALF, HALF)
    return QwenImages(
        settings=settings,
        patch_size=settings.side("patch_size", settings.vision("patch_size", 14 if is_second else 16)),
        merge_size=settings.side("merge_size", settings.vision("spatial_merge_size", 2)),
        num_frames=settings.side("temporal_patch_size", settings.vision("temporal_patch_size", _NUM_FRAMES)),
        least_pixels=settings.count("min_pixels", bounds["shortest_edge"]),
        most_pixels=settings.count("max_pixels", bounds["longest_edge"]),
        resample=settings.resample(BICUBIC),
        normalization=Normalization.of(*settings.statistics(mean, std)),
        has_times=not is_second,
        video=_video_rule(settings),
    )


def _video_rule(settings: ImageSettings) -> VideoRule:
    """Return the rule in video_preprocessor_config.json, or the one that the family was published with."""
    is_second, video = settings.model_type.startswith("qwen2"), settings.of_videos()
    least, most = (128 * 28 * 28, 768 * 28 * 28) if is_second else (1 << 12, 3 << 23)
    rate = video.number("fps", 2.0)
    if rate <= 0:
        video.refuse("fps", "it must be the number of frames per second, above 0")
    bounds = video.size("size", {"shortest_edge": least, "longest_edge": most}, most=1 << 28)
    return VideoRule(
        rate=rate,
        least_frames=video.side("min_frames", 4),
        most_frames=video.side("max_frames", 768),
        least_pixels=video.count("min_pixels", bounds["shortest_edge"]),
        most_pixels=video.count("max_pixels", bounds["longest_edge"]),
        tokens_per_second=settings.vision("tokens_per_second", 2) if settings.model_type == "qwen2_5_vl" else None,
    )
