"""Images, documents and videos that a program passes with a prompt: arrays, paths, or the bytes of files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from octavo import env
from octavo.config import PdfAs, is_read_as_text
from octavo.engine.texts.placing import ItemSeries, Placed, place_items, prompt_of
from octavo.errors import UsageError
from octavo.prompt import MediaItem, Prompt

if TYPE_CHECKING:
    from octavo.media.decoding import PictureDecoder
    from octavo.media.processor import ImageProcessor, Picture
    from octavo.media.reels import FileKind
    from octavo.tokenizer.tokenizer import Tokenizer

_KEYS = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")
# The type of a message part is also the key of its value.
IMAGE_KEYS = ("image", "image_pil", "image_url", "video", "video_url", "document", "file")
_ARTICLES: Mapping[FileKind, str] = {"image": "an image", "document": "a document", "video": "a video"}
_USUAL_RATE = 2.0  # frames per second of a video given as an array
MAX_FILE_BYTES = 64 << 20
_FILES = (str, os.PathLike, bytes, bytearray, memoryview)


class ImageInputs:
    """Makes items from images, and prompts from token ids and items. Thread-safe.

    processor: None if the model reads only text.
    """

    def __init__(
        self, tokenizer: Tokenizer, processor: ImageProcessor | None, model: str, pdf_as: PdfAs = "auto"
    ) -> None:
        """Keep the settings for reading images and documents.

        model: the model's name, for errors.
        pdf_as: how to read a PDF document that does not specify it.
        """
        self._tokenizer = tokenizer
        self._processor = processor
        self._model = model
        self._pdf_as = pdf_as
        self._decoder = None if processor is None else _decoder()

    @property
    def gives_vectors(self) -> bool:
        """True if the model computes vectors of images, so that an image is a prompt by itself.

        Raises UsageError if the model reads only text.
        """
        return self.require().gives_vectors

    def alone(self, plain: object, given: Mapping[str, Any]) -> Prompt:
        """Return the prompt that consists of one image. Raises UsageError for anything more.

        plain, given: as returned by `split_images`.
        """
        images = [self.item(image, name) for image, name in _checked(given, "image")]
        others = isinstance(plain, Mapping) and not any(plain.values()) and not _checked(given, "video")
        return prompt_of(images if others else [])

    def prompt(self, token_ids: Sequence[int], given: Mapping[str, Any]) -> Prompt:
        """Return the prompt with each image mark replaced by one of the given images.

        given: as returned by `split_images`.
        Raises UsageError if images cannot be read or their number differs from the marks.
        """
        processor = self.require()
        images = [self.item(image, name) for image, name in _checked(given, "image")]
        videos = [self.video(video, name) for video, name in _checked(given, "video")]
        video_id = self._token_id(processor.video_placeholder) if processor.video_placeholder else None
        if not videos or video_id not in token_ids:
            return self.place(token_ids, [*images, *videos])
        placeholder_id = self.placeholder_id(processor)
        waiting = {placeholder_id: iter(images), video_id: iter(videos)}
        items = [item for token_id in token_ids for item in islice(waiting.get(token_id, ()), 1)]
        items += [item for rest in waiting.values() for item in rest]  # too many: `place` raises
        return self.place([placeholder_id if token_id == video_id else token_id for token_id in token_ids], items)

    def place(self, token_ids: Sequence[int], items: Sequence[Placed]) -> Prompt:
        """Return the prompt with each image mark replaced by one of these items.

        Raises UsageError if their numbers differ.
        """
        return place_items(token_ids, items, self.placeholder_id(self.require()), self._encode)

    def require(self) -> ImageProcessor:
        """Return the processor. Raises UsageError if the model reads only text."""
        if self._processor is None:
            raise UsageError(
                f"the prompt has images, but {self._model} reads text only: leave them out, give the text of a "
                "document, or load a model with its vision encoder",
                param="multi_modal_data",
                code="unsupported_value",
            )
        return self._processor

    def reads_documents(self, pdf_as: PdfAs | None = None) -> bool:
        """Return whether PDF documents are read as text.

        pdf_as: the choice for one document, or None for the default in `EngineConfig.pdf_as`.
        """
        return is_read_as_text(pdf_as or self._pdf_as, sees=self._processor is not None)

    def document_text(self, file: Any) -> str | None:
        """Return the text layer of a PDF document (a path or its bytes), or None for anything else.

        Raises UsageError.
        """
        from octavo.media.reels import kind_of

        if not isinstance(file, _FILES) or kind_of(data := _read(file)[0]) != "document":
            return None
        if self._decoder is None:
            self._decoder = _decoder()
        try:
            return self._decoder.text(data)
        except UsageError as error:
            raise UsageError(f"a document {error}", param="multi_modal_data", code=error.code) from None

    @property
    def mark(self) -> str:
        """The text that marks an image in a raw prompt. Raises UsageError if the model reads only text."""
        processor = self.require()
        return processor.placeholder.join(processor.wrapping)

    def placeholder_id(self, processor: ImageProcessor) -> int:
        """Return the token that represents an image. Raises UsageError if the vocabulary lacks it."""
        token_id = self._token_id(processor.placeholder)
        if token_id is None:
            raise UsageError(f"the vocabulary has no token {processor.placeholder!r} for an image")
        return token_id

    def _token_id(self, text: str) -> int | None:
        ids = self._encode(text)
        return ids[0] if len(ids) == 1 else None

    def item(self, image: Any, name: str | None = None) -> MediaItem | ItemSeries:
        """Return an image in the engine's form. A document or video file becomes a series of images.

        name: the caller's name for its content, or None for a digest.
        Raises UsageError.
        """
        from octavo.media.digest import content_digest

        processor = self.require()
        data, picture = _read(image)
        if picture is None:
            return self._item_of_file(data, name)
        key = content_digest("image", data, processor) if name is None else _named(name, processor)
        layout = processor.layout(picture.width, picture.height)
        return MediaItem(key, layout, processor.resize(picture, layout))

    def video(self, video: Any, name: str | None = None) -> MediaItem | ItemSeries:
        """Return a video file, or its frames in an array or list, in the engine's form.

        Frames may be given with their rate: `(frames, {"fps": 30})`; the default is two per second.
        name: as for `item`.
        Raises UsageError.
        """
        from octavo.engine.texts.reel_items import series_of_reel
        from octavo.media.digest import content_digest
        from octavo.media.reels import VideoHeader, kind_of

        processor = self.require()
        frames, rate = video if isinstance(video, tuple) else (video, {})
        if isinstance(frames, _FILES):
            data = _read(frames)[0]
            if kind_of(data) != "video":
                raise _wrong("a video is not an MP4, MOV, WebM, Matroska or AVI file", "multi_modal_data")
            return self._item_of_file(data, name)
        pictures = _frames(frames)
        header = VideoHeader(pictures[0].width, pictures[0].height, len(pictures), _rate(rate))
        reel = processor.reel(header)
        pixels = f"{header} ".encode() + b"".join(picture.pixels.tobytes() for picture in pictures)
        key = content_digest("video", pixels, processor) if name is None else _named(name, processor)
        pairs = zip(reel.layouts, reel.frames, strict=True)
        shots = [processor.frame_tiles([pictures[i] for i in group], layout) for layout, group in pairs]
        return series_of_reel(reel, shots, processor, key)

    def _item_of_file(self, data: bytes, name: str | None) -> MediaItem | ItemSeries:
        from octavo.engine.texts.reel_items import item_of_file
        from octavo.media.reels import kind_of

        processor, kind = self.require(), kind_of(data)
        assert self._decoder is not None, "a model that sees has one"
        try:
            return item_of_file(self._decoder, data, kind, processor, None if name is None else _named(name, processor))
        except UsageError as error:
            raise UsageError(f"{_ARTICLES[kind]} {error}", param="multi_modal_data", code=error.code) from None

    def close(self) -> None:
        """End the processes that decode files. May be called twice."""
        if self._decoder is not None:
            self._decoder.close()

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False, parse_special=True)


def _decoder() -> PictureDecoder:
    from octavo.media.decoding import PictureDecoder  # not needed for text

    return PictureDecoder()


def has_images(messages: object) -> bool:
    """True if the content of a message has an image among its parts."""
    if not isinstance(messages, (list, tuple)):
        return False
    return any(
        isinstance(part, Mapping) and part.get("type") in IMAGE_KEYS
        for message in messages
        if isinstance(message, Mapping) and isinstance(message.get("content"), (list, tuple))
        for part in message["content"]
    )


def split_images(prompt: object) -> tuple[Any, Mapping[str, Any]]:
    """Return a prompt without vLLM's image keys, and a mapping of these keys to their values, which may be empty."""
    if not isinstance(prompt, Mapping):
        return prompt, {}
    given = {key: prompt[key] for key in _KEYS if prompt.get(key)}
    return {key: value for key, value in prompt.items() if key not in _KEYS}, given


def _checked(given: Mapping[str, Any], kind: str) -> list[tuple[Any, str | None]]:
    """Return the images or videos, each with the caller's name for it."""
    if options := given.get("mm_processor_kwargs"):
        raise _wrong(
            f"mm_processor_kwargs has the unsupported option {next(iter(options))!r:.80}; image_max_tokens limits the "
            "size of all images",
            "mm_processor_kwargs",
        )
    data = given.get("multi_modal_data", {})
    if not isinstance(data, Mapping) or (unknown := [key for key in data if key not in ("image", "video")]):
        found = f"{unknown[0]!r:.80}" if isinstance(data, Mapping) else f"{data!r:.80}"
        raise _wrong(
            f"multi_modal_data has {found}; it takes images and videos: {{'image': one or a list, 'video': ...}}",
            "multi_modal_data",
        )
    values = _listed(data.get(kind), kind)
    names = _listed((given.get("multi_modal_uuids") or {}).get(kind), kind) or [None] * len(values)
    if len(names) != len(values) or not all(name is None or (isinstance(name, str) and name) for name in names):
        raise _wrong(
            f"multi_modal_uuids is {names!r:.80}; it must have a text or None for each {kind}", "multi_modal_uuids"
        )
    return list(zip(values, names, strict=True))


def _listed(value: Any, kind: str) -> list[Any]:
    if value is None:
        return []
    # A tuple of pictures is a video, and so is a list of Pillow images.
    is_video = (
        kind == "video" and isinstance(value, list) and bool(value) and all(hasattr(v, "getbands") for v in value)
    )
    is_list = (isinstance(value, list) and not is_video) or (isinstance(value, tuple) and kind == "image")
    return list(value) if is_list else [value]


def _named(name: str, processor: ImageProcessor) -> bytes:
    """Return the key for content that the caller names."""
    from octavo.media.digest import content_digest

    return content_digest("name", name.encode(), processor)


def _frames(frames: Any) -> list[Picture]:
    """Return a video's frames, given as a uint8 array [frames, height, width, 3] or a list of images of one size."""
    if not isinstance(frames, (list, np.ndarray)) or not len(frames):
        raise _wrong(
            f"a video is {type(frames).__name__}; it must be a path, bytes, frames of uint8 [frames, height, width, "
            "3] or a list of images",
            "multi_modal_data",
        )
    pictures = [picture for frame in frames if (picture := _read(frame)[1]) is not None]
    if len({picture.pixels.shape for picture in pictures}) != 1 or len(pictures) != len(frames):
        raise _wrong("the frames of a video must be pictures of the same size", "multi_modal_data")
    return pictures


def _rate(metadata: Any) -> float:
    rate = metadata.get("fps") if isinstance(metadata, Mapping) else metadata
    if rate is None:
        return _USUAL_RATE
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate < 1e4:
        raise _wrong(f"fps of a video is {rate!r:.80}; it must be a positive number", "multi_modal_data")
    return float(rate)


def _read(image: Any) -> tuple[bytes, Picture | None]:
    """Return bytes that identify an image, and its pixels.

    The pixels are None if the bytes are a file, because they are decoded from it later.
    """
    from octavo.media.pictures import picture_of, picture_of_array

    if isinstance(image, (bytes, bytearray, memoryview)):
        return bytes(image), None
    if isinstance(image, (str, os.PathLike)):
        path = env.user_path(cast("str | os.PathLike[str]", image))
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise _wrong(
                    f"{path} takes more than {MAX_FILE_BYTES >> 20} MiB, the limit for an image", "multi_modal_data"
                )
            return path.read_bytes(), None
        except OSError as error:
            raise _wrong(f"{path}: {error.strerror or error}", "multi_modal_data") from None
    if isinstance(image, np.ndarray):
        picture = picture_of_array(image)
    elif hasattr(image, "getbands") and hasattr(image, "tobytes"):
        picture = picture_of(image)
    else:
        kinds = "a Pillow image, a numpy array of uint8, a path or bytes"
        raise _wrong(f"an image is {type(image).__name__}; it must be {kinds}", "multi_modal_data")
    shape = f"pixels {picture.height} {picture.width} ".encode()
    return shape + picture.pixels.tobytes(), picture


def _wrong(problem: str, param: str) -> UsageError:
    return UsageError(problem, param=param, code="invalid_value")
