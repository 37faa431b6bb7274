"""Reads the images, documents and videos of requests, from their source in the protocol to the items of a prompt."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from anyio import CapacityLimiter
from anyio.to_thread import run_sync

from octavo.engine.client import ModelInfo
from octavo.engine.texts.placing import ItemSeries
from octavo.engine.texts.reel_items import counted, item_of_file
from octavo.errors import UsageError
from octavo.media.decoding import PictureDecoder
from octavo.media.processor import ImageLayout, ImageProcessor, read_processor
from octavo.media.reels import FileKind, Reel, kind_of
from octavo.media.settings import ImageSettings
from octavo.prompt import MAX_VALUES_BYTES, MediaItem
from octavo.server.config import ServerConfig
from octavo.server.models.media_fetcher import MediaFetcher

MAX_PIXELS = 256_000_000  # in all images of a request together, at their original size
MAX_FILE_BYTES = 20 << 20  # for a file that is fetched, or read from this machine
# Of the tiles of all images in a request, including dropped messages, and therefore several times a prompt's limit.
_MAX_TILE_BYTES = 4 * MAX_VALUES_BYTES
# Threads that wait for a decoder. Images have several processes and other kinds one each, so a slow file delays
# only files of its own kind.
_WAITING = {"image": CapacityLimiter(4), "document": CapacityLimiter(1), "video": CapacityLimiter(1)}


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image, document or video as given in a request. Only its content shows which of the three it is.

    text: base64 if `is_data`, else a URL
    where: the field of the request
    detail: with `low`, the image gets as few tokens as possible
    data: the file's bytes, once it has been read
    """

    text: str
    where: str
    is_data: bool = False
    detail: Literal["low", "high", "auto"] = "auto"
    data: bytes | None = None


READ_URLS = ("data:image/", "data:application/pdf", "data:video/")
_NAMES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".pdf", ".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi")


def names_media(filename: str | None) -> bool:
    """Return True if the file name has the suffix of a readable image, document or video."""
    return filename is not None and filename.lower().endswith(_NAMES)


@dataclass(frozen=True, slots=True)
class ImageFile:
    """The bytes of a file, its source in the request, its processor, and the layout in which the model sees it."""

    data: bytes
    kind: FileKind
    source: ImageSource
    processor: ImageProcessor
    shown: ImageLayout | Reel

    @property
    def layout(self) -> ImageLayout | ItemSeries:
        """The file's positions in a prompt, without pixels."""
        return counted(self.shown, self.processor)


class ImageReader:
    """Reads the images of requests within the server's limits."""

    def __init__(self, config: ServerConfig | None = None) -> None:
        self._config = config or ServerConfig()
        self._fetcher = MediaFetcher(self._config.allowed_media_domains, MAX_FILE_BYTES)
        self._decoder = PictureDecoder(self._config.max_image_pixels)

    def check_count(self, sources: Sequence[ImageSource]) -> None:
        """Raise UsageError if there are more images, documents and videos than a request may contain."""
        most = self._config.max_items_per_request
        if len(sources) > most:
            raise UsageError(
                f"the request has {len(sources)} images, documents and videos; at most {most} are allowed "
                "(--max-items-per-request)",
                param=sources[most].where,
                code="too_many_items",
            )

    async def open(self, info: ModelInfo, sources: Sequence[ImageSource]) -> list[ImageFile]:
        """Open the files of these images. Only their headers are read.

        info: information about the model, which must accept images

        Raises UsageError naming the field.
        """
        settings = info.images
        assert settings is not None
        self.check_count(sources)
        found, num_pixels, num_bytes = [], 0, 0
        for source in sources:
            data = await self._bytes(source)
            kind, processor = kind_of(data), image_processor(settings, source.detail == "low")
            shown, file_pixels = await self._shown(data, kind, source, processor)
            if shown.num_tokens >= info.max_model_len:
                problem = f"needs {shown.num_tokens} tokens, but the context has only {info.max_model_len - 1}"
                error = UsageError(f"{problem}: send a smaller one", code="context_length_exceeded")
                raise _about(source, error, kind)
            num_bytes += _tile_bytes(shown, processor)
            if num_bytes > _MAX_TILE_BYTES:
                problem = (
                    f"is too much: a request may have at most {_MAX_TILE_BYTES >> 20} MiB of resized images and pages"
                )
                error = UsageError(f"{problem}; send fewer pages or smaller images", code="image_too_large")
                raise _about(source, error, kind)
            num_pixels += file_pixels
            if num_pixels > MAX_PIXELS:
                problem = (
                    f"is too much: the images of a request may have at most {MAX_PIXELS // 1_000_000} million pixels "
                    "in total; send fewer or smaller ones"
                )
                raise _about(source, UsageError(problem, code="image_too_large"))
            found.append(ImageFile(data, kind, source, processor, shown))
        return found

    async def _shown(
        self, data: bytes, kind: FileKind, source: ImageSource, processor: ImageProcessor
    ) -> tuple[ImageLayout | Reel, int]:
        """Return a file's layout and its number of pixels.

        The number is 0 for documents and videos, because they are decoded one picture at a time.
        """
        try:
            if kind == "image":
                header = self._decoder.header(data)
                return processor.layout(*header.size), header.stored_width * header.stored_height
            return await run_sync(self._decoder.reel, data, kind, processor, limiter=_WAITING[kind]), 0
        except UsageError as error:
            raise _about(source, error, kind) from None

    async def item(self, file: ImageFile) -> MediaItem | ItemSeries:
        """Decode an image, document or video. This takes a while. Raises UsageError naming the field."""
        limiter = _WAITING[file.kind]
        try:
            return await run_sync(item_of_file, self._decoder, file.data, file.kind, file.processor, limiter=limiter)
        except UsageError as error:
            raise _about(file.source, error, file.kind) from None

    async def read(self, source: ImageSource) -> ImageSource:
        """Return the source with its bytes, which are fetched only once. Raises UsageError naming the field."""
        return replace(source, data=await self._bytes(source))

    async def text(self, source: ImageSource) -> str | None:
        """Return the text layer of a PDF document, or None if the file is not a PDF. Raises UsageError naming the
        field.
        """
        data = await self._bytes(source)
        if kind_of(data) != "document":
            return None
        try:
            return await run_sync(self._decoder.text, data, limiter=_WAITING["document"])
        except UsageError as error:
            raise _about(source, error, "document") from None

    def close(self) -> None:
        """End the decoding processes. May be called twice."""
        self._decoder.close()

    async def _bytes(self, source: ImageSource) -> bytes:
        if source.data is not None:
            return source.data
        if source.is_data:
            return _decoded(source.text, source)
        scheme, _, rest = source.text.partition(":")
        match scheme.lower():
            case "data":
                kind, comma, text = rest.partition(",")
                if not comma or not kind.lower().endswith(";base64"):
                    raise _wrong(source, "is a data URL without base64; send data:image/png;base64,...")
                return _decoded(text, source)
            case "http" | "https":
                return await self._fetcher.fetch(source.text, source.where)
            case "file":
                return self._local(source)
        raise _wrong(source, "is not an image URL; send data:image/png;base64,...")

    def _local(self, source: ImageSource) -> bytes:
        """Read a file on this machine, if it is inside the folder given by `--allowed-local-media-path`."""
        folder = self._config.allowed_local_media_path
        if folder is None:
            reason = "is a file:// URL, but this server reads no files; send the image as data:image/png;base64,..."
            raise _wrong(source, f"{reason} or start the server with --allowed-local-media-path")
        parts = urlsplit(source.text)
        root = Path(folder).resolve()
        path = Path(unquote(parts.path)).resolve()
        problem = UsageError("cannot be read: no such image in the folder of local images", code="invalid_image_url")
        if parts.netloc not in ("", "localhost") or not path.is_relative_to(root) or not path.is_file():
            raise _about(source, problem)
        try:
            with path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except OSError:
            raise _about(source, problem) from None
        if len(data) > MAX_FILE_BYTES:
            raise _about(source, UsageError(f"has more than {MAX_FILE_BYTES} bytes", code="image_too_large"))
        return data


@lru_cache(maxsize=16)
def image_processor(settings: ImageSettings, is_low: bool = False) -> ImageProcessor:
    """Return the processor with these settings.

    is_low: give an image as few tokens as the model family allows
    """
    processor = read_processor(settings.model_type, settings.config, settings.preprocessor)
    return processor.limited(1) if is_low else processor


def _decoded(text: str, source: ImageSource) -> bytes:
    """Decode strict base64, without white space or other characters."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _about(source, UsageError("is not base64", code="invalid_value")) from None


def _tile_bytes(shown: ImageLayout | Reel, processor: ImageProcessor) -> int:
    """Return the number of bytes that the pixels of all tiles of a file take."""
    layouts = (shown,) if isinstance(shown, ImageLayout) else shown.layouts
    return sum(layout.num_bytes(processor.patch_size) for layout in layouts)


def _about(source: ImageSource, error: UsageError, kind: FileKind = "image") -> UsageError:
    """Add the file's place in the request to an error about the file."""
    return UsageError(f"{source.where}: the {kind} {error}", param=source.where, code=error.code)


def _wrong(source: ImageSource, reason: str) -> UsageError:
    return UsageError(f"{source.where} {reason}", param=source.where, code="invalid_value")
