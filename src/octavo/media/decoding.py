"""Decoding of image, document and video files to tiles, in processes without network, files or much memory."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.confined_process import ConfinedProcess
from octavo.errors import UsageError
from octavo.media.headers import ImageHeader, read_header
from octavo.media.reels import FileKind, Reel, reel_of

if TYPE_CHECKING:
    from octavo.media.processor import ImageLayout, ImageProcessor, UInt8

MAX_DECODE_SECONDS = 10.0
MAX_REEL_SECONDS = 60.0  # computing time for a document or a video
MAX_IMAGE_PIXELS = 50_000_000
_LIBRARIES: Mapping[FileKind, tuple[tuple[str, str, str], ...]] = {
    "image": (("PIL", "Pillow", "vision"),),
    "document": (("PIL", "Pillow", "vision"), ("pypdfium2", "pypdfium2", "pdf")),
    "video": (("PIL", "Pillow", "vision"), ("av", "PyAV", "video")),
}


class PictureDecoder:
    """Decodes and resizes files in separate processes, which start on first use. Thread-safe."""

    def __init__(
        self,
        max_pixels: int = MAX_IMAGE_PIXELS,
        *,
        num_processes: int = 2,
        max_seconds: float = MAX_DECODE_SECONDS,
    ) -> None:
        """Initialize the decoder.

        max_pixels: maximum number of pixels in an image file
        max_seconds: maximum computing time for an image
        """
        self.max_pixels = max_pixels
        self._max_seconds = max_seconds
        self._idle: dict[FileKind, queue.LifoQueue[_WorkerProcess | None]] = {}
        for kind in _LIBRARIES:
            self._idle[kind] = queue.LifoQueue()
            for _ in range(num_processes if kind == "image" else 1):
                self._idle[kind].put(None)

    def header(self, data: bytes) -> ImageHeader:
        """Return the header of an image file.

        Raises UsageError if the file is not an image or is too large. The message is a predicate about the image, such
        as `is damaged`.
        """
        header = read_header(data)
        width, height = header.size
        if width * height > self.max_pixels:
            raise UsageError(
                f"is {width} x {height} pixels, more than the {_millions(self.max_pixels)} of --max-image-pixels",
                code="image_too_large",
            )
        return header

    def tiles(self, data: bytes, processor: ImageProcessor) -> tuple[ImageLayout, tuple[UInt8, ...]]:
        """Return the layout of the image in this file, and its tiles. Waits for an idle process.

        Raises the errors of `header`, also for a damaged file, and the errors of `ImageProcessor.layout`.
        """
        header = self.header(data)
        layout = processor.layout(*header.size)
        pixels = header.stored_width * header.stored_height
        request = {"header": asdict(header), "pixels": pixels, "seconds": self._max_seconds}
        return layout, self._asked("image", data, processor, request)[1]

    def reel(self, data: bytes, kind: FileKind, processor: ImageProcessor) -> Reel:
        """Return the pages or frames of a file as the model will see them. At most the first one is decoded.

        Raises UsageError if the file is damaged or too large. The message is a predicate about the file, such as `is
        damaged`.
        """
        return reel_of(kind, self._asked_of_reel(data, kind, processor, measures=True)[0], processor)

    def shots(
        self, data: bytes, kind: FileKind, processor: ImageProcessor
    ) -> tuple[Reel, tuple[tuple[UInt8, ...], ...]]:
        """Return the reel of a file, with the tiles of each of its items. Raises the same errors as `reel`."""
        header, tiles = self._asked_of_reel(data, kind, processor, measures=False)
        reel, waiting = reel_of(kind, header, processor), iter(tiles)
        return reel, tuple(tuple(next(waiting) for _ in layout.tiles) for layout in reel.layouts)

    def text(self, data: bytes) -> str:
        """Return the text layer of a PDF document.

        Raises UsageError if the file is damaged or has no text layer. The message is a predicate about the file, such
        as `has no text`.
        """
        request = {"pixels": self.max_pixels, "seconds": MAX_REEL_SECONDS, "reads": True}
        found = "\n\n".join(filter(None, self._asked("document", data, None, request)[0]))
        if not found:
            raise UsageError(
                "has no text, only pictures of its pages: use a vision model, with pdf_as pages",
                code="invalid_document",
            )
        return found

    def _asked_of_reel(
        self, data: bytes, kind: FileKind, processor: ImageProcessor, *, measures: bool
    ) -> tuple[Any, tuple[UInt8, ...]]:
        request = {"pixels": self.max_pixels, "seconds": MAX_REEL_SECONDS, "measures": measures}
        return self._asked(kind, data, processor, request)

    def _asked(
        self, kind: FileKind, data: bytes, processor: ImageProcessor | None, request: Mapping[str, Any]
    ) -> tuple[Any, tuple[UInt8, ...]]:
        """Ask a process for the header and tiles of a file, and return them. Waits for an idle process."""
        check_installed(kind)
        request = {**request, "kind": kind, "num_bytes": len(data)}
        if processor is not None:
            own = processor.settings
            request["settings"] = [own.model_type, own.config, own.preprocessor]
        with self._worker(kind) as worker:
            answer = worker.ask(json.dumps(request, default=str).encode() + b"\n", data)
            if answer is None:
                worker.close()
                raise UsageError(
                    f"takes more than {request['seconds']:g} s or too much memory to decode: send a smaller one",
                    code=f"invalid_{kind}",
                )
            return answer

    @contextmanager
    def _worker(self, kind: FileKind) -> Iterator[_WorkerProcess]:
        worker = self._idle[kind].get()
        try:
            if worker is None or not worker.is_usable():
                worker = _WorkerProcess(kind)
            yield worker
        finally:
            self._idle[kind].put(worker)

    def close(self) -> None:
        """End the idle processes. May be called twice; `tiles` starts new ones."""
        for idle in self._idle.values():
            for _ in range(idle.qsize()):
                if (worker := idle.get()) is not None:
                    worker.close()
                idle.put(None)


def check_installed(kind: FileKind) -> None:
    """Raise UsageError if a library for files of this kind is missing."""
    for module, name, extra in _LIBRARIES[kind]:
        if find_spec(module) is None:
            raise UsageError(
                f"cannot be read: {name} is not installed; pip install 'octavo[{extra}]'", code="unsupported_value"
            )


class _WorkerProcess(ConfinedProcess):
    """A decoding process. Not thread-safe."""

    def __init__(self, kind: FileKind) -> None:
        self._kind = kind
        # Pass on nothing of this environment, which may contain keys.
        environment = {"OPENBLAS_NUM_THREADS": "1"}
        super().__init__(Path(__file__).with_name("picture_worker.py"), environment, kind)

    def ask(self, line: bytes, data: bytes) -> tuple[Any, tuple[UInt8, ...]] | None:
        """Return the header and the tiles of a file, or None if the process died. Raises UsageError if it refuses the
        file.
        """
        self.write(line + data)
        head = self.read_line()
        if head is None:
            return None
        answer: dict[str, Any] = json.loads(head)
        if "refusal" in answer:
            raise UsageError(answer["refusal"], code=f"invalid_{self._kind}")
        tiles = []
        for height, width in answer["tiles"]:
            pixels = self.read(height * width * 3)
            if pixels is None:
                return None
            tiles.append(np.frombuffer(pixels, np.uint8).reshape(height, width, 3))
        return answer["header"], tuple(tiles)


def _millions(count: int) -> str:
    return f"{count // 1_000_000} million" if count % 1_000_000 == 0 else f"{count:,}"
