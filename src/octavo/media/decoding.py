"""Image files to tiles, decoded in processes without network, files or much memory."""

from __future__ import annotations

import json
import queue
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.confined_process import ConfinedProcess
from octavo.errors import UsageError
from octavo.media.headers import ImageHeader, read_header

if TYPE_CHECKING:
    from octavo.media.processor import ImageLayout, ImageProcessor, UInt8

MAX_DECODE_SECONDS = 10.0
MAX_IMAGE_PIXELS = 50_000_000


class PictureDecoder:
    """Decodes and resizes images in processes of its own, which start on first use. Thread-safe."""

    def __init__(
        self,
        max_pixels: int = MAX_IMAGE_PIXELS,
        *,
        num_processes: int = 2,
        max_seconds: float = MAX_DECODE_SECONDS,
    ) -> None:
        """max_pixels: of an image in its file. max_seconds: of computing for an image."""
        self.max_pixels = max_pixels
        self._max_seconds = max_seconds
        self._idle: queue.LifoQueue[_WorkerProcess | None] = queue.LifoQueue()
        for _ in range(num_processes):
            self._idle.put(None)

    def header(self, data: bytes) -> ImageHeader:
        """The header of a file. Raises UsageError, the rest of a sentence about the image, for one that is no image or
        is too large."""
        header = read_header(data)
        width, height = header.size
        if width * height > self.max_pixels:
            raise UsageError(
                f"is {width} x {height} pixels, more than the {_millions(self.max_pixels)} of --max-image-pixels",
                code="image_too_large",
            )
        return header

    def tiles(self, data: bytes, processor: ImageProcessor) -> tuple[ImageLayout, tuple[UInt8, ...]]:
        """The layout of the image in this file, and its tiles. Waits for an idle process.

        Raises the errors of `header`, for a damaged file too, and those of `ImageProcessor.layout`.
        """
        header = self.header(data)
        layout = processor.layout(*header.size)
        check_installed()
        settings = processor.settings
        request = {
            "settings": [settings.model_type, settings.config, settings.preprocessor],
            "header": asdict(header),
            "seconds": self._max_seconds,
            "num_bytes": len(data),
        }
        worker = self._idle.get()
        try:
            if worker is None or not worker.is_usable():
                worker = _WorkerProcess()
            answer = worker.ask(json.dumps(request, default=str).encode() + b"\n", data)
            if answer is None:
                worker.close()
                raise UsageError(
                    f"takes more than {self._max_seconds:g} s or too much memory to decode: send a smaller one",
                    code="invalid_image",
                )
            return layout, answer
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Ends the idle processes. May be called twice; `tiles` starts new ones."""
        for _ in range(self._idle.qsize()):
            if (worker := self._idle.get()) is not None:
                worker.close()
            self._idle.put(None)


def check_installed() -> None:
    """Raises UsageError if Pillow is missing."""
    if find_spec("PIL") is None:
        raise UsageError(
            "cannot be read: Pillow is missing here; pip install 'octavo[vision]'", code="unsupported_value"
        )


class _WorkerProcess(ConfinedProcess):
    """One process. Not thread-safe."""

    def __init__(self) -> None:
        # Nothing of this environment, which may hold keys.
        super().__init__(Path(__file__).with_name("picture_worker.py"), {"OPENBLAS_NUM_THREADS": "1"})

    def ask(self, line: bytes, data: bytes) -> tuple[UInt8, ...] | None:
        """The tiles of an image. None: the process died. Raises UsageError if it refuses the image."""
        self.write(line + data)
        head = self.read_line()
        if head is None:
            return None
        answer: dict[str, Any] = json.loads(head)
        if "refusal" in answer:
            raise UsageError(answer["refusal"], code="invalid_image")
        tiles = []
        for height, width in answer["tiles"]:
            pixels = self.read(height * width * 3)
            if pixels is None:
                return None
            tiles.append(np.frombuffer(pixels, np.uint8).reshape(height, width, 3))
        return tuple(tiles)


def _millions(count: int) -> str:
    return f"{count // 1_000_000} million" if count % 1_000_000 == 0 else f"{count:,}"
