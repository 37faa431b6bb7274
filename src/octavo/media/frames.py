"""Decoding of video frames to pictures with FFmpeg's libraries. Used only in the decoding process."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

import av
import numpy as np
from av.stream import Disposition

from octavo.errors import UsageError
from octavo.media.processor import Picture
from octavo.media.reels import VideoHeader

_USUAL_RATE = 24.0  # for files that do not specify it


class Frames:
    """An open video, decoded on one thread.

    Raises UsageError. The message is a predicate about the video, such as `has no pictures`.
    """

    def __init__(self, data: bytes, max_pixels: int) -> None:
        """Open the video.

        max_pixels: maximum number of pixels per frame
        """
        self._container = av.open(io.BytesIO(data), "r", metadata_errors="ignore")
        films = [each for each in self._container.streams.video if not each.disposition & Disposition.attached_pic]
        if not films:
            raise UsageError("has no pictures, only sound")
        self._stream, self._max_pixels = films[0], max_pixels
        self._stream.thread_type = "NONE"
        self._stream.codec_context.thread_count = 1
        width, height = self._stream.width, self._stream.height
        if width * height > max_pixels:
            raise UsageError(f"is {width} x {height} pixels, more than the {max_pixels:,} of --max-image-pixels")

    def header(self) -> VideoHeader:
        """Return the video's header. Frames are counted without being decoded, except for the first one."""
        num_frames = sum(packet.size > 0 and not packet.is_discard for packet in self._container.demux(self._stream))
        self._container.seek(0)
        first = next(self._container.decode(self._stream), None)
        if first is None:
            raise EOFError
        turned = first.rotation // 90 % 2 == 1
        width, height = (first.height, first.width) if turned else (first.width, first.height)
        rate = self._stream.average_rate
        return VideoHeader(width, height, num_frames, float(rate) if rate else _USUAL_RATE)

    def pictures(self, numbers: Sequence[int]) -> Iterator[tuple[int, Picture]]:
        """Yield each of these frames with its number, in ascending order."""
        self._container.seek(0)
        frames = enumerate(self._container.decode(self._stream))
        for number in numbers:
            frame = next((frame for i, frame in frames if i == number), None)
            if frame is None:
                raise EOFError
            if frame.width * frame.height > self._max_pixels:
                raise UsageError("has larger frames than its header declares")
            pixels = np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90)
            yield number, Picture(np.ascontiguousarray(pixels))


def blank_video() -> bytes:
    """Return a video file with one grey frame."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=1, width=16, height=16, pix_fmt="yuv420p")
        frame = av.VideoFrame.from_ndarray(np.full((16, 16, 3), 128, np.uint8), format="rgb24")
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            container.mux(packet)
    return buffer.getvalue()
